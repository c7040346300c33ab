"""cpflare: exact context-parallel training and inference of FLARE and FLARE++ on large meshes."""

__version__ = "0.1.0"
