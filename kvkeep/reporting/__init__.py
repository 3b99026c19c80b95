"""The report: pictures of what was measured, on one page.

Must not measure anything.
"""
