"""The page of one run: what its folder holds, section by section."""

from wflmc.report.run.page import run_page

__all__ = ["run_page"]
