"""What people see: figures, tables, and plans in words."""

from wflmc.report.ablation import ablation
from wflmc.report.figures import draw_figure, write_csv
from wflmc.report.panels import draw_panels, draw_reliability
from wflmc.report.plan_picture import check_picture, draw_plan
from wflmc.report.record_picture import draw_record
from wflmc.report.text import (
    answer_sentence,
    audit_table,
    capacity_tables,
    claims_table,
    diagnosis_lines,
    plan_table,
)

__all__ = [
    "ablation",
    "answer_sentence",
    "audit_table",
    "capacity_tables",
    "check_picture",
    "claims_table",
    "diagnosis_lines",
    "draw_figure",
    "draw_panels",
    "draw_plan",
    "draw_record",
    "draw_reliability",
    "plan_table",
    "write_csv",
]
