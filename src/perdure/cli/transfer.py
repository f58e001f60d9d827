"""Commands export and import: one run with its history, as a JSON file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import counted, literal, print_json, print_out, printable
from perdure.cli.session import UsageError, error_reporting, with_client
from perdure.cli.settings import existing_store, store_url


def export(
    id: options.RunId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: stdout.", show_default=False)
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Write one run with its history as JSON."""
    with error_reporting(json):
        data = with_client(existing_store(store_url(store)), lambda client: client.export_history(id))
        if output is None:
            print_json(data)
            return
        import msgspec

        try:
            output.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}", "use another path") from None
        if json:
            print_json({"run": id, "file": printable(str(output)), "entries": len(data["entries"])})
        else:
            print_out(literal(f"Exported run {id} to {output} ({counted(len(data['entries']), 'history row')})"))


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file written by `export`; `-` is stdin.", show_default=False)
    ],
    new_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="The new id of the run. Default: its own.", show_default=False),
    ] = None,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Import an exported run. A run that was open is held until it is resumed."""
    from perdure.admin.run_import import import_run

    with error_reporting(json):
        url, data = store_url(store), _read(file)
        run_id = with_client(url, lambda client: import_run(client, data, run_id=new_id))
        if json:
            print_json({"run": run_id})
        else:
            print_out(literal(run_id))


def _read(file: Path) -> Any:
    import msgspec

    try:
        text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return msgspec.json.decode(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", code=3) from None
    except RecursionError:
        reason = "it nests too deep"
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
    raise UsageError(f"{file} is not valid JSON: {reason}", "use a file written by perdure export ID -o FILE")
