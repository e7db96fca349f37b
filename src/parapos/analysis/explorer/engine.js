"use strict";
// A ViT with any of parapos' score terms, in plain JavaScript. Numbers are those of PyTorch in float64.
//
// N tokens, D width, H heads, h size of a query head, w size of a value head. Matrices are row-major: weights
// have 32 bits, all else 64, as scores of several hundred are to be exact to 1e-4.
//
// A layer's scores are
//   scale (q_i.k_j + D^T M_i D + g_i.D) + weight * (-slope |D|, or -Infinity outside a field of view),  D = r_j - r_i,
// where M_i and g_i are read from the token, and q and k may be turned by angles that grow with the position.

const EPS = 1e-5; // of LayerNorm
const EDGE = 1 - 1e-4; // cones include their edge
const FIELDS = {
  "all": () => true,
  "up-left": (dx, dy) => dy <= 0 && dx <= 0,
  "up-right": (dx, dy) => dy <= 0 && dx >= 0,
  "down-left": (dx, dy) => dy >= 0 && dx <= 0,
  "down-right": (dx, dy) => dy >= 0 && dx >= 0,
  "up": (dx, dy) => -dy >= Math.abs(dx) * EDGE,
  "down": (dx, dy) => dy >= Math.abs(dx) * EDGE,
  "left": (dx, dy) => -dx >= Math.abs(dy) * EDGE,
  "right": (dx, dy) => dx >= Math.abs(dy) * EDGE,
};

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// The weights of a model by name. Quantised ones become Float32 here.
function unpack(model) {
  const bytes = bytesOf(model.weights), tensors = {};
  for (const [name, about] of Object.entries(model.tensors)) {
    const count = about.shape.reduce((a, b) => a * b, 1), out = new Float32Array(count);
    const view = new DataView(bytes.buffer, about.offset);
    if (about.dtype === "float32") for (let i = 0; i < count; i++) out[i] = view.getFloat32(4 * i, true);
    else if (about.dtype === "float16") for (let i = 0; i < count; i++) out[i] = halfToNumber(view.getUint16(2 * i, true));
    else { // int8: a float32 factor for each row, then the numbers
      const rows = about.shape[0], width = count / rows;
      for (let i = 0; i < count; i++) out[i] = view.getInt8(4 * rows + i) * view.getFloat32(4 * Math.floor(i / width), true);
    }
    tensors[name] = out;
  }
  return tensors;
}

function linear(x, n, width, weight, bias, size) {
  const out = new Float64Array(n * size);
  for (let i = 0; i < n; i++) {
    for (let o = 0; o < size; o++) {
      let sum = bias ? bias[o] : 0;
      for (let d = 0, a = i * width, b = o * width; d < width; d++) sum += x[a + d] * weight[b + d];
      out[i * size + o] = sum;
    }
  }
  return out;
}

function norm(x, n, width, weight, bias) {
  const out = new Float64Array(x.length);
  for (let i = 0; i < n; i++) {
    let mean = 0, variance = 0;
    for (let d = 0; d < width; d++) mean += x[i * width + d];
    mean /= width;
    for (let d = 0; d < width; d++) variance += (x[i * width + d] - mean) ** 2;
    const factor = 1 / Math.sqrt(variance / width + EPS);
    for (let d = 0; d < width; d++) out[i * width + d] = (x[i * width + d] - mean) * factor * weight[d] + bias[d];
  }
  return out;
}

// erf with a relative error below 1.2e-7: the Chebyshev fit of erfc.
function erf(x) {
  const t = 1 / (1 + 0.5 * Math.abs(x));
  const c = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277];
  let sum = 0;
  for (let i = c.length - 1; i >= 0; i--) sum = sum * t + c[i];
  const tail = t * Math.exp(-x * x + sum);
  return x >= 0 ? 1 - tail : tail - 1;
}

const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));
const softplus = (x) => (x > 20 ? x : Math.log1p(Math.exp(x)));

// Positions of a grid, row by row, after a class token if there is one.
function positionsOf(model, rows, cols, scale) {
  const first = model.cls ? 1 : 0, n = rows * cols + first;
  const x = new Float64Array(n), y = new Float64Array(n), placed = new Uint8Array(n).fill(1);
  if (model.cls === "unplaced") placed[0] = 0;
  for (let i = 0; i < rows * cols; i++) {
    x[first + i] = Math.fround(Math.fround(1 + (i % cols)) * Math.fround(scale));
    y[first + i] = Math.fround(Math.fround(1 + Math.floor(i / cols)) * Math.fround(scale));
  }
  return { n, first, x, y, placed, rows, cols };
}

function embed(model, tensors, image, height, width, at) {
  const { patch, dim, channels } = model, out = new Float64Array(at.n * dim);
  const weight = tensors["embedding.weight"], bias = tensors["embedding.bias"];
  if (at.first) out.set(tensors["cls"]);
  for (let i = 0; i < at.rows * at.cols; i++) {
    const top = Math.floor(i / at.cols) * patch, left = (i % at.cols) * patch;
    for (let d = 0; d < dim; d++) {
      let sum = bias[d], w = d * channels * patch * patch;
      for (let c = 0; c < channels; c++)
        for (let v = 0; v < patch; v++)
          for (let u = 0, p = (c * height + top + v) * width + left; u < patch; u++) sum += image[p + u] * weight[w++];
      out[(at.first + i) * dim + d] = sum;
    }
  }
  return out;
}

// nD-sincos: for each axis all sines, then all cosines.
function addSincos(model, x, at) {
  const size = Math.floor(model.dim / 2);
  for (let i = 0; i < at.n; i++) {
    if (!at.placed[i]) continue;
    let place = i * model.dim;
    for (let axis = 0; axis < 2; axis++) {
      const n = size + (axis === 1 ? model.dim % 2 : 0), r = axis ? at.y[i] : at.x[i];
      for (const [start, turn] of [[0, Math.sin], [1, Math.cos]])
        for (let d = start; d < n; d += 2) x[place++] += turn(r / model.sincosBase ** ((2 * Math.floor(d / 2)) / n));
    }
  }
}

// Heads first: (H, N, size) from rows of H * size numbers that begin at `start`.
function split(rows, n, width, start, heads, size) {
  const out = new Float64Array(heads * n * size);
  for (let h = 0; h < heads; h++)
    for (let i = 0; i < n; i++)
      for (let d = 0; d < size; d++) out[(h * n + i) * size + d] = rows[i * width + start + h * size + d];
  return out;
}

// Component d turns with d + h/2, by the angle r . frequencies.
function rotate(t, n, heads, size, frequencies, at) {
  const half = size / 2;
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < n; i++) {
      if (!at.placed[i]) continue;
      for (let d = 0, p = (h * n + i) * size; d < half; d++, p++) {
        const angle = at.x[i] * frequencies[(h * 2) * half + d] + at.y[i] * frequencies[(h * 2 + 1) * half + d];
        const cos = Math.cos(angle), sin = Math.sin(angle), a = t[p], b = t[p + half];
        t[p] = a * cos - b * sin;
        t[p + half] = a * sin + b * cos;
      }
    }
  }
}

// M_i as (xx, xy, yy) and g_i as (x, y) of every head and token: (H, N, 5), or null for encodings without them.
function formsOf(model, layer, tensors, prefix, x, n) {
  const about = layer.form;
  if (!about) return null;
  const { heads, dim } = model, out = new Float64Array(heads * n * 5);
  const a = tensors[prefix + "a"], outer = tensors[prefix + "outer"], lower = tensors[prefix + "lower"];
  const slope = tensors[prefix + "slope"], constant = tensors[prefix + "constant_a"], slopeConstant = tensors[prefix + "constant_g"];
  const read = (weight, row, i) => {
    let sum = 0;
    for (let d = 0, p = row * dim, t = i * dim; d < dim; d++) sum += weight[p + d] * x[t + d];
    return sum;
  };
  for (let h = 0; h < heads; h++) {
    for (let i = 0; i < n; i++) {
      const p = (h * n + i) * 5;
      if (about.kind === "direct") { // M = -L L^T - f L0 L0^T, L lower triangular: (xx, yx, yy)
        const start = tensors[prefix + "l_0"], f = about.floor / (1 - about.floor);
        const l = [0, 1, 2].map((k) => start[h * 3 + k] + read(lower, h * 3 + k, i)), o = [0, 1, 2].map((k) => start[h * 3 + k]);
        out[p] = -(l[0] * l[0]) - f * o[0] * o[0];
        out[p + 1] = -(l[0] * l[1]) - f * o[0] * o[1];
        out[p + 2] = -(l[1] * l[1] + l[2] * l[2]) - f * (o[1] * o[1] + o[2] * o[2]);
      } else if (outer) {
        for (let k = 0, m = about.parabolas; k < m; k++) {
          let steep = a ? read(a, h * m + k, i) : constant[h * m + k];
          steep += about.offset;
          if (about.activation) steep = softplus(steep);
          for (let c = 0; c < 3; c++) out[p + c] += steep * outer[(h * m + k) * 3 + c];
        }
      }
      if (slope) for (let c = 0; c < 2; c++) out[p + 3 + c] = read(slope, h * 2 + c, i);
      else if (slopeConstant) for (let c = 0; c < 2; c++) out[p + 3 + c] = slopeConstant[h * 2 + c];
    }
  }
  return out;
}

// The parts of one query's scores over all tokens. form: (xx, xy, yy, gx, gy), by default the query's own.
function partsOf(model, layer, state, at, head, query, form) {
  const { n } = at, { q, k, forms, size } = state, scale = layer.scale;
  const distance = new Float64Array(n), direction = new Float64Array(n), bias = new Float64Array(n), semantics = new Float64Array(n);
  const own = form || (forms ? forms.subarray((head * n + query) * 5, (head * n + query) * 5 + 5) : null);
  const look = layer.bias ? layer.bias[head] : null, isFree = (i) => !at.placed[i] || (i === 0 && at.first === 1 && layer.clsIsFree);
  const inside = look ? FIELDS[look.field] : null;
  for (let j = 0; j < n; j++) {
    let sum = 0;
    for (let d = 0, a = (head * n + query) * size, b = (head * n + j) * size; d < size; d++) sum += q[a + d] * k[b + d];
    semantics[j] = sum * scale;
    const both = at.placed[query] && at.placed[j], dx = both ? at.x[j] - at.x[query] : 0, dy = both ? at.y[j] - at.y[query] : 0;
    if (own) {
      distance[j] = scale * (own[0] * dx * dx + 2 * own[1] * dx * dy + own[2] * dy * dy);
      direction[j] = scale * (own[3] * dx + own[4] * dy);
    }
    if (look && !(isFree(query) || isFree(j))) bias[j] = inside(dx, dy) ? -look.slope * Math.hypot(dx, dy) : -Infinity;
  }
  const scores = new Float64Array(n);
  for (let j = 0; j < n; j++) scores[j] = distance[j] + direction[j] + bias[j] + semantics[j];
  return { distance, direction, bias, semantics, scores, attention: softmax(scores), form: own ? Array.from(own) : null };
}

// What every query takes from the values v (H, N, w): rows (N, H w). The same scores as in `partsOf`, without the parts.
function mix(layer, { q, k, forms, size }, at, heads, v, out) {
  const { n } = at, { scale, valueDim } = layer, row = new Float64Array(n), sums = new Float64Array(valueDim);
  for (let head = 0; head < heads; head++) {
    const look = layer.bias ? layer.bias[head] : null, inside = look ? FIELDS[look.field] : null, start = head * n;
    for (let i = 0; i < n; i++) {
      const f = (start + i) * 5, xx = forms ? forms[f] : 0, xy = forms ? 2 * forms[f + 1] : 0, yy = forms ? forms[f + 2] : 0;
      const gx = forms ? forms[f + 3] : 0, gy = forms ? forms[f + 4] : 0, a = (start + i) * size;
      let most = -Infinity, total = 0;
      for (let j = 0; j < n; j++) {
        let score = 0;
        for (let d = 0, b = (start + j) * size; d < size; d++) score += q[a + d] * k[b + d];
        if (at.placed[i] && at.placed[j]) {
          const dx = at.x[j] - at.x[i], dy = at.y[j] - at.y[i];
          if (forms) score += (xx * dx + xy * dy + gx) * dx + (yy * dy + gy) * dy;
          score *= scale;
          if (look && !((i === 0 || j === 0) && at.first === 1 && layer.clsIsFree)) score += inside(dx, dy) ? -look.slope * Math.hypot(dx, dy) : -Infinity;
        } else score *= scale;
        row[j] = score;
        if (score > most) most = score;
      }
      sums.fill(0);
      for (let j = 0; j < n; j++) {
        const weight = Math.exp(row[j] - most);
        total += weight;
        for (let d = 0, b = (start + j) * valueDim; d < valueDim; d++) sums[d] += weight * v[b + d];
      }
      for (let d = 0, to = (i * heads + head) * valueDim; d < valueDim; d++) out[to + d] = sums[d] / total;
    }
  }
}

function softmax(scores) {
  let most = -Infinity, total = 0;
  for (const s of scores) most = Math.max(most, s);
  const out = Float64Array.from(scores, (s) => Math.exp(s - most));
  for (const e of out) total += e;
  return out.map((e) => e / total);
}

// Runs a model on an image (channels, height, width). Keeps of every layer what `partsOf` needs.
function forward(model, tensors, image, height, width, scale) {
  const { dim, heads, patch } = model, at = positionsOf(model, height / patch, width / patch, scale), { n } = at;
  let x = embed(model, tensors, image, height, width, at);
  if (model.sincosBase) addSincos(model, x, at);
  x = norm(x, n, dim, tensors["norm_pre.weight"], tensors["norm_pre.bias"]);
  const states = model.layers.map((layer, index) => {
    const prefix = `${index}.`, size = layer.headDim, width = heads * (2 * size + layer.valueDim);
    const h = norm(x, n, dim, tensors[prefix + "norm1.weight"], tensors[prefix + "norm1.bias"]);
    const rows = linear(h, n, dim, tensors[prefix + "qkv.weight"], tensors[prefix + "qkv.bias"], width);
    const q = split(rows, n, width, 0, heads, size), k = split(rows, n, width, heads * size, heads, size);
    const v = split(rows, n, width, 2 * heads * size, heads, layer.valueDim);
    const frequencies = tensors[prefix + "frequencies"];
    if (frequencies) for (const t of [q, k]) rotate(t, n, heads, size, frequencies, at);
    const state = { q, k, size, forms: formsOf(model, layer, tensors, prefix, h, n) };
    const mixed = new Float64Array(n * heads * layer.valueDim);
    mix(layer, state, at, heads, v, mixed);
    const out = linear(mixed, n, heads * layer.valueDim, tensors[prefix + "proj.weight"], tensors[prefix + "proj.bias"], dim);
    for (let i = 0; i < x.length; i++) x[i] += out[i];
    const inner = norm(x, n, dim, tensors[prefix + "norm2.weight"], tensors[prefix + "norm2.bias"]);
    const hidden = linear(inner, n, dim, tensors[prefix + "fc1.weight"], tensors[prefix + "fc1.bias"], layer.hidden).map(gelu);
    const more = linear(hidden, n, layer.hidden, tensors[prefix + "fc2.weight"], tensors[prefix + "fc2.bias"], dim);
    for (let i = 0; i < x.length; i++) x[i] += more[i];
    return state;
  });
  x = norm(x, n, dim, tensors["norm_post.weight"], tensors["norm_post.bias"]);
  const pooled = new Float64Array(dim);
  if (model.pool === "cls") pooled.set(x.subarray(0, dim));
  else for (let d = 0; d < dim; d++) { let sum = 0; for (let i = 0; i < n; i++) sum += x[i * dim + d]; pooled[d] = sum / n; }
  const classes = model.classes.length;
  const logits = linear(pooled, 1, dim, tensors["classifier.weight"], tensors["classifier.bias"], classes);
  return { at, states, logits };
}
