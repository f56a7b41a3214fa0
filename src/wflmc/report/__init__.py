"""What people see: figures, tables, and plans in words."""

from wflmc.report.plan_figure import check_picture, draw_plan
from wflmc.report.study_figures import draw_closed_form, draw_reliability, draw_study
from wflmc.report.tables import write_csv
from wflmc.report.text import (
    ablation,
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
    "draw_closed_form",
    "draw_plan",
    "draw_reliability",
    "draw_study",
    "plan_table",
    "write_csv",
]
