"""The embedded engine: a real model, run over kvkeep's pages.

Must not import its parts, so that reading one of them does not need torch.
"""
