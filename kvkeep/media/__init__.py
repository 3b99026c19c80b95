"""Names for images, audio and other media: digests of what they are and of how they are preprocessed.

`digest` is the way in.
"""
