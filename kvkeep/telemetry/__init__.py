"""What a cache tells of itself: counters as snapshots, their exposition, and the events of its index.

Must not change what it observes.
"""
