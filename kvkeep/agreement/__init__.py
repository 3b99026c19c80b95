"""What the ranks of one model agree on: settings at the start, the length of a match, that a request may run.

`group.Group` is the way in; `minimum` and `leader` are the two ways to come to an agreement.
"""
