"""`prefixd completion`: what a shell sources so that Tab knows the verbs and flags."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_PREFIXD_COMPLETE"
"""click's variable, by which the sourced script asks the command."""
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    bash: source <(prefixd completion bash). zsh: the same, after compinit.
    fish: prefixd completion fish | source.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(context.find_root().command, {}, "prefixd", VARIABLE).source())
