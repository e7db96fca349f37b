"""Attention with score terms. `attend` runs it, `explain` says how."""

from .kernels import KERNELS, Call, Kernel, register_kernel
from .select import AttentionPlan, KernelError, attend, explain
from .terms import Distance, Polynomial, Quadratic, Relative, Table, Term

__all__ = [
    "KERNELS", "AttentionPlan", "Call", "Distance", "Kernel", "KernelError", "Polynomial", "Quadratic", "Relative",
    "Table", "Term", "attend", "explain", "register_kernel",
]  # fmt: skip
