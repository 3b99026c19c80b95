"""Pages: what one is, who owns it, where its bytes are.

Must not know names, tokens or streams.
"""
