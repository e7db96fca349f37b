"""parapos: position encodings for vision transformers, exact and fused. Importing it loads torch and nothing else."""

from . import interop, predict
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
from .data import register_dataset
from .encodings import Encoding, create_encoding, fold, list_encodings, register_encoding
from .models import ViT, create_model, list_models, register_model
from .positions import Positions, event_positions, grid_positions, point_positions, tubelet_positions
from .tasks import register_task

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
    "predict",
    "register_dataset",
    "register_encoding",
    "register_kernel",
    "register_model",
    "register_task",
    "tubelet_positions",
]
