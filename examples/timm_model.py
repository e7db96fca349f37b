# %% [markdown]
# # PaPE in a timm model, and in DINOv2
#
# After this page a model that you already use has PaPE. `swap` gives every attention layer of a timm or Hugging Face
# vision model an encoding and keeps its weights; `unswap` takes it out again. At first the model's outputs are the
# same as before, because PaPE starts at zero here; it learns when you fine-tune.

# %%
import timm
import torch
from transformers import Dinov2Config, Dinov2Model

import parapos.interop.timm
import parapos.interop.transformers

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10, dynamic_img_size=True).eval()
parapos.interop.timm.swap(model, "pape", options={"parabolas": 8})
with torch.no_grad():
    for size in (224, 320):
        print(size, "pixels:", tuple(model(torch.randn(1, 3, size, size)).shape))
new = parapos.interop.timm.new_parameters(model)
print(f"{sum(p.numel() for p in new):,} new parameters")

# %% [markdown]
# A DINOv2 of Hugging Face transformers. Here it is made small and with random weights, so that this script needs no
# download; `AutoModel.from_pretrained("facebook/dinov2-base")` gives you the real one.

# %%
config = Dinov2Config(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14)
dino = Dinov2Model(config).eval()
parapos.interop.transformers.swap(dino, "pape", options={"parabolas": 8})
with torch.no_grad():
    print("DINOv2:", tuple(dino(torch.randn(1, 3, 84, 84)).last_hidden_state.shape))
