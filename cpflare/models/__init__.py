"""Models: mixers of reduce stages and emit, in one backbone. None of them knows a rank."""

from cpflare.models.backbone import Backbone, build_model

__all__ = ["Backbone", "build_model"]
