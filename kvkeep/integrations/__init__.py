"""Adapters for engines that others have written: one module an engine.

Must not import its parts: each of them needs the engine that it is for.
"""
