"""cpflare: exact context-parallel training and inference of low-rank attention on large meshes."""

__version__ = "0.1.0"
