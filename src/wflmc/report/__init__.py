"""What people see: figures, tables, and plans in words."""

from wflmc.report.figures import draw_curves, draw_regimes, write_csv
from wflmc.report.text import claims_table, plan_table

__all__ = ["claims_table", "draw_curves", "draw_regimes", "plan_table", "write_csv"]
