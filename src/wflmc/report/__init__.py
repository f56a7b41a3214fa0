"""What people see: figures, tables, and plans in words."""

from wflmc.report.figures import draw_figure, write_csv
from wflmc.report.plan_picture import check_picture, draw_plan
from wflmc.report.text import claims_table, plan_table

__all__ = ["check_picture", "claims_table", "draw_figure", "draw_plan", "plan_table", "write_csv"]
