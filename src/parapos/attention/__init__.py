"""Attention with score terms. `attend` runs it, `explain` says how."""

from .select import KERNELS, KernelError, Plan, attend, explain
from .terms import Distance, Polynomial, Quadratic, Table, Term

__all__ = [
    "KERNELS",
    "Distance",
    "KernelError",
    "Plan",
    "Polynomial",
    "Quadratic",
    "Table",
    "Term",
    "attend",
    "explain",
]
