"""Replays recorded requests over the real index, pools and eviction, without a model and without page bytes.

formats -> Trace -> Pages (cut and named once) ; orders -> requests ; replay(pages, requests, settings) -> ReplayResult
"""
