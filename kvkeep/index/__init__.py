"""What is cached and where: names, the run tree, the eviction orders.

Must not know where a page's bytes are.
"""
