# %% [markdown]
# # Your own table over seeds
#
# After this page you can compare encodings, or any other settings, over several seeds with one file and one command.
# A table is a TOML file: rows are changes to a recipe, columns are evaluations, and seeds are repeats.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "mine.toml").write_text("""
title = "PaPE and RoPE on digits, cut to seconds"
seeds = [0, 1]

[blocks]
digits = "digits_smoke"

[rows]
pape = { "model.encoding" = "pape" }
pape-few = { "model.encoding" = "pape", "model.encodings.pape.parabolas" = 2 }
rope = { "model.encoding" = "rope" }

[columns]
1x = { size = 16 }
2x = { size = 32 }
"2x interpolated" = { size = 32, interpolate = true }
""")

# %% [markdown]
# `--dry-run` says what would be trained. Without it, missing runs are trained and evaluated; run the same command again
# to resume. `--jobs 2` trains two at a time, one thread each.

# %%
table = [sys.executable, "-m", "parapos", "table", str(folder / "mine.toml")]  # in a shell: parapos table mine.toml
table += ["--root", str(folder / "runs"), "--results", str(folder / "results")]
subprocess.run([*table, "--dry-run"], check=True)
subprocess.run([*table, "--jobs", "2"], check=True)

# %% [markdown]
# The results: `table.md` with means and spreads, `cells.csv` with every single number, and plots.

# %%
print(sorted(path.name for path in (folder / "results").iterdir()))
