"""PaPE: each head adds m concave parabolas of the relative position, with coefficients read from the token.

    S_ij = <a_i, (W_p D)^2> + <b_i, W_p D> + <q_i, k_j>,   D = r_j - r_i,   a_i = -softplus(W_a x_i),   b_i = W_b x_i

B batch, N tokens, D model width, H heads, p position dims, m parabolas. Before attention the m parabolas collapse to
M_i = W_p^T diag(a_i) W_p (p x p) and g_i = (W_p^T W_b) x_i (p), so b_i and W_p D are never formed, in training either.
form="direct" reads both from the token without parabolas: M_i = -L_i L_i^T - f L_0 L_0^T with L_i = L_0 + W_L x_i lower
triangular, and g_i = W_g x_i.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.terms import Quadratic, Term
from ..positions import Positions
from ..tracing import cast, no_autocast
from .base import Encoding
from .claims import Claims

FORMS = ("parabolas", "direct")
FLOOR = 0.25  # chosen in docs/results/desk-forms.md
CACHED_TOKENS = 512  # times 600 numbers, as 12 heads with 50 parabolas have, are 1.2 MB
STEEPNESS = 0.733  # the mean of softplus(N(0, 1/3)), which is -a_i at the start for unit-variance tokens
INITS = {"paper": (1.0, 0.0, 1.0), "wide": (0.25, 0.0, 1.0)}  # factor of W_p, constant inside softplus, unit of D


def _wide(x: Tensor) -> Tensor:
    """float32 for half precision: positional arithmetic never runs in half."""
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def _uniform(*shape: int, fan_in: int, factor: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-(fan_in**-0.5), fan_in**-0.5) * factor)


def _outer(w_p: Tensor) -> Tensor:
    """-w w^T of each parabola: (H, p p, m)."""
    w = w_p.mT
    return (w[:, :, None] * -w[:, None]).flatten(1, 2)


def _are_many(x: Tensor) -> bool:
    """Whether tokens (B, N, D) have more numbers than stay in a processor's cache. In a graph they never do."""
    is_graph = torch.compiler.is_compiling() or torch._C._is_tracing() or x.device.type != "cpu"
    return not is_graph and x.shape[0] * x.shape[1] > CACHED_TOKENS


class PaPE(Encoding):
    """Parabolic position encoding.

    parabolas: m per head, default 50. Ablations, each on by default: distance (the a term), direction (the b term),
    context (a and b from the token; else one learned a and b per head), activation (softplus; else a = -W_a x,
    unbounded), projection (W_p; else D itself, m = p). init: "paper", "wide" for small models, or three numbers: the
    factor of the drawn W_p, the constant inside softplus, the unit of D.

    form="direct" needs no parabolas: p (p + 1) / 2 + p outputs per head, the lower triangle L_i and g_i. It reaches
    every concave form and starts in the law of m parabolas, m >= p. floor is the share of a head's form that every
    token keeps, from 0 up to 1: f = floor / (1 - floor). Without it many tokens learn a direction that never decays.
    Ablations, the constant inside softplus and compat belong to parabolas, floor to the direct form.
    """

    claims = Claims(translation=True, rotation=False, decay=True, direction=True, context=True)
    quirks = "the linear term has the opposite sign"

    def __init__(
        self,
        *,
        parabolas: int | None = None,
        distance: bool = True,
        direction: bool = True,
        context: bool = True,
        activation: bool = True,
        projection: bool = True,
        init: str | tuple[float, ...] | list[float] = "paper",
        form: str = "parabolas",
        floor: float | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        if floor is not None and (form != "direct" or not 0 <= floor < 1):
            raise ValueError(
                f"floor must be at least 0 and below 1, with form='direct' only, got {floor} with {form!r}"
            )
        m = parabolas if parabolas is not None else 50 if projection else self.pos_dim
        if not isinstance(m, int) or m < 1 or not (projection or m == self.pos_dim):
            want = "a positive integer" if projection else f"{self.pos_dim} without projection"
            raise ValueError(f"parabolas must be {want}, got {parabolas!r}")
        if not distance and not (direction and activation):
            raise ValueError("distance=False needs direction, else use encoding='none', and forbids activation=False")
        start = tuple(INITS.get(init, ()) if isinstance(init, str) else init)
        if len(start) != 3 or (start != INITS["paper"] and not (distance and activation and projection)):
            want = f"one of {', '.join(INITS)} or three numbers, and 'paper' where a part is off"
            raise ValueError(f"init must be {want}, got {init!r}")
        factor, self.offset, self.unit = start
        if form == "direct":
            whole = distance and direction and context and activation and projection
            self._check_direct(m, whole=whole)
        self.parabolas, self.activation, self.projection = m, activation, projection
        self.distance, self.direction, self.context = distance, direction, context
        shape = (self.heads, m, self.dim)
        self.w_p = _uniform(self.heads, m, self.pos_dim, fan_in=self.pos_dim, factor=factor) if projection else None
        self.w_a = _uniform(*shape, fan_in=self.dim) if distance and context else None
        self.w_b = _uniform(*shape, fan_in=self.dim) if direction and context else None
        # The law that W x has at the start for unit-variance x.
        self.a = nn.Parameter(torch.randn(shape[:2]) * 3**-0.5) if distance and not context else None
        self.b = nn.Parameter(torch.randn(shape[:2]) * 3**-0.5) if direction and not context else None
        self.w_g: nn.Parameter | None = None
        self.l_0: nn.Parameter | None = None
        self.w_l: nn.Parameter | None = None
        self.form = form
        self.floor = FLOOR if floor is None else floor
        if form == "direct":
            self._replace_parabolas()

    def _check_direct(self, m: int, *, whole: bool) -> None:
        if not whole:
            parts = "distance, direction, context, activation and projection"
            raise ValueError(f"form='direct' has no ablations: leave {parts} on, or take form='parabolas'")
        if self.compat is not None:
            raise ValueError(f"form='direct' is not in the release: compat must be None, got {self.compat!r}")
        if self.offset:
            raise ValueError(f"form='direct' has no softplus: the second number of init must be 0, got {self.offset}")
        if m < self.pos_dim:
            reason = "fewer parabolas than position dims leave a direction without decay, so L_0 would be singular"
            raise ValueError(f"parabolas must be at least {self.pos_dim} with form='direct', got {m}: {reason}")

    @torch.no_grad()
    def _replace_parabolas(self) -> None:
        """Start the direct form in the law of the drawn parabolas: the mean of M, its linear change with x, and g.

        A = 0.733 W_p^T W_p is the mean of -M, and L_0 the Cholesky factor of what the floor leaves, (1 - floor) A.
        Softplus changes -M by dA = 1/2 sum_l w_l w_l^T (W_a x)_l to first order, and L by L_0 Phi(L_0^-1 dA L_0^-T);
        Phi keeps the lower triangle, its diagonal halved. With W_p = Q R and c = 0.733 (1 - floor), L_0 = sqrt(c) R^T,
        and the argument of Phi is Q^T diag(W_a x) Q / 2c.
        """
        assert self.w_p is not None
        assert self.w_a is not None
        c = STEEPNESS * (1 - self.floor)
        q, r = torch.linalg.qr(self.w_p / self.unit)  # (H, m, p), (H, p, p)
        sign = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)  # L_0 has a positive diagonal
        start = c**0.5 * (r * sign[..., None]).transpose(1, 2)
        q = q * sign[:, None]
        change = torch.einsum("hmu,hmv,hmd->huvd", q, q, self.w_a) / (2 * c)
        phi = torch.ones_like(start).tril() - 0.5 * torch.eye(self.pos_dim, device=start.device)
        rows, columns = torch.tril_indices(self.pos_dim, self.pos_dim)
        self.l_0 = nn.Parameter(start[:, rows, columns])
        self.w_l = nn.Parameter(torch.einsum("huk,hkvd->huvd", start, phi[..., None] * change)[:, rows, columns])
        self.fold()
        assert self.w_g is not None
        self.w_g.requires_grad_()
        self.w_p = self.w_a = None

    def _projection(self) -> Tensor:
        """W_p (H, m, p) for D in its unit. Its sign only matters to the linear term, which has the other in quirks."""
        unit = -self.unit if self.compat == "official" else self.unit
        some = _wide(next(self.parameters()) if self.w_p is None else self.w_p)
        own = torch.eye(self.pos_dim, dtype=some.dtype, device=some.device) if self.w_p is None else some
        return (own if unit == 1 else own / unit).expand(self.heads, -1, -1)

    def _read(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight (H, n, D) times each token: (B, H, N, n)."""
        numbers = _wide(F.linear(x, weight.flatten(0, 1).to(x.dtype)))  # (B, N, H n)
        return numbers.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _steepness(self, a: Tensor) -> Tensor:
        """-a_i; the sign goes to the small side of the product that follows."""
        a = _wide(a) + self.offset if self.offset else _wide(a)
        return F.softplus(a) if self.activation else a

    def _form(self, x: Tensor, w_p: Tensor) -> Tensor:
        """M_i = W_p^T diag(a_i) W_p: (B, H, N, p, p)."""
        with no_autocast(x.device):
            outer = _outer(w_p)  # (H, p p, m)
        if self.w_a is None:
            assert self.a is not None
            form = outer @ self._steepness(self.a)[..., None]  # (H, p p, 1)
            return form.mT.unflatten(-1, w_p.shape[-1:] * 2).expand(x.shape[0], -1, x.shape[1], -1, -1)
        tokens, weight, forms = x.flatten(0, 1), self.w_a.flatten(0, 1).to(x.dtype), []
        for part in tokens.split(CACHED_TOKENS) if _are_many(x) else [tokens]:
            a = self._steepness(weight @ part.mT).unflatten(0, (self.heads, -1))  # (H, m, tokens)
            with no_autocast(x.device):
                forms.append(outer @ a)
        form = forms[0] if len(forms) == 1 else torch.cat(forms, -1)
        return form.unflatten(-1, x.shape[:2]).permute(2, 0, 3, 1).unflatten(-1, w_p.shape[-1:] * 2)

    def _square(self, lower: Tensor) -> Tensor:
        """L L^T (..., p, p) of lower triangles (..., p (p + 1) / 2)."""
        numbers, axes = iter(lower.unbind(-1)), range(self.pos_dim)
        rows = [[next(numbers) for _ in range(u + 1)] for u in axes]  # row u of L has u + 1 numbers
        half = [[reduce(torch.add, map(torch.mul, rows[u], rows[v])) for v in range(u + 1)] for u in axes]
        return torch.stack([half[max(u, v)][min(u, v)] for u in axes for v in axes], -1).unflatten(-1, (len(axes),) * 2)

    def _direct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """M_i = -L_i L_i^T - f L_0 L_0^T: (B, H, N, p, p), and g_i (B, H, N, p), both from one product."""
        assert self.w_l is not None
        assert self.l_0 is not None
        assert self.w_g is not None
        numbers = self._read(x, torch.cat([self.w_l, self.w_g], dim=1))
        lower, slope = numbers.split([self.w_l.shape[1], self.pos_dim], dim=-1)
        l_0 = _wide(self.l_0)[:, None]  # (H, 1, p (p + 1) / 2)
        floor = self.floor / (1 - self.floor) * self._square(l_0)
        return -floor - self._square(l_0 + lower), slope

    def fold(self) -> None:
        """Keep W_p^T W_b (H, p, D) instead of W_b, for inference. The direct form has only that from the start."""
        if self.w_b is not None:
            folded = self._projection().transpose(1, 2) @ _wide(self.w_b)
            self.w_g, self.w_b = nn.Parameter(folded.detach(), requires_grad=False), None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Weights decide: the module is folded afterwards if and only if they are."""
        if self.form == "parabolas" and prefix + "w_l" not in state_dict:
            shape = (self.heads, self.pos_dim, self.dim)
            if self.w_b is not None and prefix + "w_g" in state_dict:
                self.w_g, self.w_b = nn.Parameter(_wide(self.w_b).new_empty(shape), requires_grad=False), None
            elif self.w_g is not None and prefix + "w_b" in state_dict:
                shape = (self.heads, self.parabolas, self.dim)
                self.w_b, self.w_g = nn.Parameter(next(self.parameters()).new_empty(shape)), None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _slope(self, x: Tensor, w_p: Tensor) -> Tensor:
        """g_i = (W_p^T W_b) x_i: (B, H, N, p). W_b is folded before it meets a token."""
        with no_autocast(x.device):
            if self.b is not None:
                g = (w_p * _wide(self.b)[..., None]).sum(1)[None, :, None, :]
                return g.expand(x.shape[0], -1, x.shape[1], -1)
            folded = self.w_g if self.w_b is None else w_p.transpose(1, 2) @ _wide(self.w_b)
            assert folded is not None
        return self._read(x, folded)

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        if self.w_l is not None:
            return q, k, (Quadratic(*self._direct(x), r, keys),)
        w_p = self._projection()
        form = self._form(x, w_p) if self.distance else None
        slope = self._slope(x, w_p) if self.direction else None
        return q, k, (Quadratic(form, slope, r, keys),)


class PaPERI(Encoding):
    """The rotation-invariant form: S_ij = alpha_i w_p^2 |D|^2 + q.k with alpha_i = -softplus(w_a . x_i).

    w_p is one number per head, drawn once and kept in the state dict; learn_wp trains it.
    """

    claims = Claims(translation=True, rotation=True, decay=True, direction=False, context=True)

    def __init__(self, *, learn_wp: bool = False, **common: Any) -> None:
        super().__init__(**common)
        self.w_a = _uniform(self.heads, self.dim, fan_in=self.dim)
        w_p = _uniform(self.heads, fan_in=self.pos_dim)
        self.w_p: Tensor
        if learn_wp:
            self.w_p = w_p
        else:
            self.register_buffer("w_p", w_p.detach())

    def encode(
        self, x: Tensor, q: Tensor, k: Tensor, r: Positions, keys: Positions | None
    ) -> tuple[Tensor, Tensor, tuple[Term, ...]]:
        alpha = -F.softplus(_wide(F.linear(x, self.w_a.to(x.dtype))))  # (B, N, H)
        form = alpha.transpose(1, 2) * _wide(self.w_p).square()[:, None]
        return q, k, (Quadratic(form, None, r, keys),)
