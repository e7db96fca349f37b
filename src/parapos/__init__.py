"""parapos: position encodings for vision transformers, exact and fused. Importing it loads torch and nothing else."""

from . import interop
from .attention import (
    AttentionPlan,
    Distance,
    KernelError,
    Polynomial,
    Quadratic,
    Table,
    attend,
    explain,
    register_kernel,
)
from .blocks import Attention, Block, Encoder
from .encodings import Encoding, create_encoding, fold, list_encodings
from .models import ViT, create_model, list_models
from .positions import Positions, event_positions, grid_positions, point_positions, tubelet_positions

__version__ = "0.1.0.dev0"

__all__ = [
    "Attention",
    "AttentionPlan",
    "Block",
    "Distance",
    "Encoder",
    "Encoding",
    "KernelError",
    "Polynomial",
    "Positions",
    "Quadratic",
    "Table",
    "ViT",
    "attend",
    "create_encoding",
    "create_model",
    "event_positions",
    "explain",
    "fold",
    "grid_positions",
    "interop",
    "list_encodings",
    "list_models",
    "point_positions",
    "register_kernel",
    "tubelet_positions",
]
