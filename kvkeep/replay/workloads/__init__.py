"""Synthetic workloads that repeat media and prompts, one a modality, and their replay over one budget of bytes.

parameters -> Workload (requests with media and encoder outputs) -> Serving (a cache without bytes) -> what it saved
"""
