"""Vision-language models in the embedded engine: images become features, features take the place of placeholders.

Must not know the scheduler.
"""
