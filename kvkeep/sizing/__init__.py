"""How large should the tiers be?  Hit curves of recorded requests, and of a cache that runs.

requests -> lru_curve -> HitCurve (one pass, every size) ; other orders by replays at some sizes ; table, sentence, plot
"""
