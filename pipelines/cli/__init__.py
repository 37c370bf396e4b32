"""The `asyncrl` command: one module per subcommand, imported only when it is called."""

from pipelines.cli.app import main as main
