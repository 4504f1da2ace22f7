"""Standalone tools that live inside a Blackwell training image; nothing here imports the host-side `builder` package."""
