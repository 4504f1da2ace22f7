"""Builds pinned, prewarmed training images for NVIDIA Blackwell from version matrices."""

__version__ = "0.1.0"
