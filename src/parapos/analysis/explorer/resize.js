"use strict";
// An RGB image (3, height, width) at another size: triangle filter, wide enough not to alias, as PyTorch and Pillow do.
function resize(image, height, width, toHeight, toWidth) {
  const along = (size, to) => {
    const factor = size / to, support = Math.max(1, factor);
    return Array.from({ length: to }, (_, o) => {
      const middle = (o + 0.5) * factor, from = Math.max(0, Math.floor(middle - support + 0.5)), end = Math.min(size, Math.floor(middle + support + 0.5));
      const weights = [];
      for (let i = from; i < end; i++) weights.push(Math.max(0, 1 - Math.abs((i + 0.5 - middle) / support)));
      const total = weights.reduce((a, b) => a + b, 0);
      return { from, weights: weights.map((w) => w / total) };
    });
  };
  const across = along(width, toWidth), down = along(height, toHeight);
  const wide = new Float32Array(3 * height * toWidth), out = new Float32Array(3 * toHeight * toWidth);
  for (let row = 0; row < 3 * height; row++)
    for (let o = 0; o < toWidth; o++) {
      let sum = 0;
      across[o].weights.forEach((w, i) => { sum += w * image[row * width + across[o].from + i]; });
      wide[row * toWidth + o] = sum;
    }
  for (let c = 0; c < 3; c++)
    for (let o = 0; o < toHeight; o++)
      for (let u = 0; u < toWidth; u++) {
        let sum = 0;
        down[o].weights.forEach((w, i) => { sum += w * wide[(c * height + down[o].from + i) * toWidth + u]; });
        out[(c * toHeight + o) * toWidth + u] = sum;
      }
  return out;
}
