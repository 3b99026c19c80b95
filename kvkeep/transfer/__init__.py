"""Moving page bytes between the tiers: plans, the manager, the gates, and the backends that copy.

Must not know names or tokens.
"""
