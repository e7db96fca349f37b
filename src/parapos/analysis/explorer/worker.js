// The worker: keeps the models and the last forward pass of each, and answers one request at a time.
const loaded = [], last = [];

function run({ model: index, image, height, width, scale }) {
  const { model, tensors } = loaded[index], pixels = height * width;
  const given = Float32Array.from(image, (value, i) => (value - model.mean[Math.floor(i / pixels)]) / model.std[Math.floor(i / pixels)]);
  const key = JSON.stringify([height, width, scale]);
  const before = last[index];
  if (!before || before.key !== key || before.image.length !== image.length || before.image.some((v, i) => v !== image[i]))
    last[index] = { key, image, ...forward(model, tensors, given, height, width, scale) };
  return { logits: Array.from(last[index].logits) };
}

function look({ model: index, layer, head, query, form }) {
  const { model } = loaded[index], { at, states } = last[index];
  return { first: at.first, ...partsOf(model, model.layers[layer], states[layer], at, head, at.first + query, form) };
}

const answers = {
  load: ({ models }) => { models.forEach((model) => loaded.push({ model, tensors: unpack(model) })); return {}; },
  run,
  look,
  // Attention of one query in every head, for the overview.
  heads: ({ model: index, query }) => {
    const { model } = loaded[index];
    return { maps: model.layers.map((_, layer) => Array.from({ length: model.heads }, (_, head) => look({ model: index, layer, head, query }).attention)) };
  },
};

onmessage = ({ data }) => {
  try {
    postMessage({ id: data.id, ...answers[data.what](data) });
  } catch (error) {
    postMessage({ id: data.id, error: String(error) });
  }
};
