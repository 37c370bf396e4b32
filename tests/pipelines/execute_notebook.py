"""Executes a notebook in a real kernel in the directory it is started in: `python execute_notebook.py NOTEBOOK`.

Prints what its cells show, as a list for each.
"""

import json
import sys

import nbformat
from nbclient import NotebookClient

if __name__ == "__main__":
    notebook = nbformat.read(sys.argv[1], as_version=4)
    client = NotebookClient(notebook, timeout=250)
    client.create_kernel_manager()
    client.km.transport = "ipc"
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    print(json.dumps([[output.get("data") or output.get("text") for output in cell.outputs] for cell in cells]))
