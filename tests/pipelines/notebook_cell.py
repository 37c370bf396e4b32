"""Runs a cell in a real kernel and prints what it shows: `python notebook_cell.py MODEL ROOT`."""

import json
import sys

import nbformat
from nbclient import NotebookClient

CELL = """
from pipelines.pipeline import Pipeline

def reward(prompt, completion, answer):
    return float(len(completion))

result = Pipeline(
    model={model!r}, root={root!r}, prompts=[(f"a{{i}}b+1=", "") for i in range(9)], reward=reward, steps=2,
    rollout={{"group_size": 2, "max_tokens": 24}}, flow={{"groups_per_step": 2, "groups_per_take": 1}},
    evaluation={{"prompts": 4}},
).run()
result
"""

if __name__ == "__main__":
    model, root = sys.argv[1:]
    cell = nbformat.v4.new_code_cell(CELL.format(model=model, root=root))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = NotebookClient(notebook, timeout=90)
    client.create_kernel_manager()
    client.km.transport = "ipc"
    client.execute()
    print(json.dumps([(output.output_type, output.get("data", {})) for output in notebook.cells[0].outputs]))
