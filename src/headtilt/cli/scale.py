"""Commands beyond one image and one terminal: ``predict``, ``serve``, ``playground``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from headtilt.cli.app import Device, app, progress
from headtilt.cli.options import EXIT_CODES, Strict

Model = Annotated[
    str,
    typer.Option(
        help="hf:NAME, timm:NAME, torchvision:NAME, onnx:FILE, pt2:FILE, zoo:NAME or python:MODULE:FUNCTION.",
        metavar="SPEC",
    ),
]
Bundle = Annotated[
    Path | None,
    typer.Option(help="Folder that `headtilt fit` wrote for this model. It sets the levels.", metavar="FOLDER"),
]
Levels = Annotated[
    str, typer.Option(help="What to search without a bundle, separated by commas: rotation,scale,shear,…")
]


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt predict ./photos --model hf:FOLDER --bundle fitted --out rows\n\n"
    "[dim]$[/dim] headtilt predict 'shards/{000..127}.tar' --model hf:FOLDER --out rows --engine ray --actors 8\n\n"
    "The rows are in part-….parquet; any parquet reader opens them as one table. If a run is stopped, start the same "
    "command again: it computes only what is missing. Ray's usage statistics are off unless "
    f"RAY_USAGE_STATS_ENABLED=1 is set.\n\n{EXIT_CODES}"
)
def predict(
    source: Annotated[
        str, typer.Argument(help="A folder, a quoted pattern such as 'a/*.png', parquet files, or WebDataset tars.")
    ],
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the rows. It must hold nothing else.")],
    bundle: Bundle = None,
    strict: Strict = True,
    levels: Levels = "rotation",
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Default: start one here."),
    ] = None,
    actors: Annotated[int, typer.Option(min=1, help="Copies of the model on Ray.")] = 2,
    cpus: Annotated[int, typer.Option(min=1, help="Cores for each copy on Ray; it also decodes images on them.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs for each copy on Ray; 0.5 puts two copies on one.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Images per search.")] = 64,
    shard_rows: Annotated[int, typer.Option(min=1, help="Rows per output file.")] = 2000,
    decoders: Annotated[
        int | None, typer.Option(min=1, help="Processes that decode images. Default: one per core, at most 8.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of parquet files with images or paths.")] = None,
    device: Device = "auto",
) -> None:
    """Classify any number of images into parquet files, one row per image. Can be stopped and resumed."""
    from headtilt.apps.batch.job import predict as run_batch
    from headtilt.apps.batch.plan import Job
    from headtilt.apps.batch.ray_engine import Cluster
    from headtilt.apps.loading import Wrapped
    from headtilt.errors import one_of
    from headtilt.model.device import resolve_device

    one_of("engine", engine, ("local", "ray"))
    on_gpu = engine == "ray" and gpus > 0
    # On Ray the driver only reads the fingerprint: the actors choose their own device.
    where = "cpu" if engine == "ray" else resolve_device(device)
    wrapped = Wrapped(model, None if bundle is None else str(bundle), levels, where, strict)
    job = Job(source, out, wrapped, column, batch, shard_rows, decoders)
    cluster = Cluster(address, actors, cpus, gpus, "cuda" if on_gpu else "cpu")
    with progress() as tell:
        run = run_batch(job, cluster.compute if engine == "ray" else None, tell)
    console, errors = Console(highlight=False, soft_wrap=True), run.errors()
    for sentence in run.mended:
        console.print(f"[yellow]note:[/yellow] {escape(sentence)}")
    console.print(f"[bold]{run.count:,}[/bold] rows in {run.shards:,} files: {escape(str(out))}")
    if errors:
        console.print(f"[yellow]{errors:,}[/yellow] of them hold an error instead of an answer (column error).")
        raise typer.Exit(2 if errors == run.count else 1)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt serve --model hf:FOLDER --bundle fitted\n\n"
    "[dim]$[/dim] curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/classify\n\n"
    "[dim]$[/dim] curl -F file=@photo.jpg 'http://127.0.0.1:8000/explain?format=png' > search.png"
)
def serve(
    model: Model,
    bundle: Bundle = None,
    strict: Strict = True,
    levels: Levels = "rotation",
    host: Annotated[
        str, typer.Option(help="Address to listen on. With 0.0.0.0 other machines can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Images per search.")] = 32,
    max_wait_ms: Annotated[
        int, typer.Option(min=1, help="Milliseconds that the first request of a batch waits for others.")
    ] = 5,
    queue: Annotated[int, typer.Option(min=1, help="Maximum requests at once; more are answered with 503.")] = 256,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum bytes of a request; more are answered with 413.")
    ] = 10_000_000,
    max_pixels: Annotated[
        int, typer.Option(min=1, help="Maximum pixels of an image; more are answered with 413.")
    ] = 25_000_000,
    upload_seconds: Annotated[float, typer.Option(min=0.1, help="Time limit for an upload; then 408.")] = 10.0,
    decode_seconds: Annotated[float, typer.Option(min=0.1, help="Time limit for decoding an image; then 422.")] = 5.0,
    answer_seconds: Annotated[float, typer.Option(min=0.1, help="Time limit for an answer; then 503.")] = 30.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another host name that requests may use; may be given several times. * allows all."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Answer over HTTP: /classify, /explain, /healthz, /readyz, /metrics, /docs. Requests are batched.

    By default only this machine can connect. There are no passwords: put a proxy in front of the service.
    """
    from headtilt.apps.loading import Wrapped
    from headtilt.apps.serve.limits import Limits
    from headtilt.apps.serve.server import LOOPBACK, make_app
    from headtilt.apps.serve.server import serve as run_service
    from headtilt.model.device import resolve_device

    limits = Limits(
        bytes=max_bytes,
        pixels=max_pixels,
        upload_seconds=upload_seconds,
        decode_seconds=decode_seconds,
        answer_seconds=answer_seconds,
        queue=queue,
        batch=max_batch,
        wait_ms=max_wait_ms,
    )
    wrapped = Wrapped(model, None if bundle is None else str(bundle), levels, resolve_device(device), strict)
    service = make_app(*wrapped.load(), limits, hosts=(*LOOPBACK, host, *(allow_host or ())))
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    aside.print(f"[bold]{escape(model)}[/bold] at http://{host}:{port}/classify")
    if host not in LOOPBACK:
        aside.print("[yellow]note:[/yellow] other machines can reach this address, and there is no password.")
        if not allow_host:
            aside.print("[yellow]note:[/yellow] requests that name another host are refused. See --allow-host.")
    run_service(service, host, port, limits)


@app.command(
    epilog="[bold]Examples[/bold]\n\n"
    "[dim]$[/dim] headtilt playground\n\n"
    "[dim]$[/dim] headtilt playground --model hf:FOLDER --bundle fitted --examples ./photos\n\n"
    "Everything runs on this machine. Gradio's analytics are off unless GRADIO_ANALYTICS_ENABLED=True is set."
)
def playground(
    model: Annotated[
        str | None, typer.Option(help="A classifier, such as hf:NAME. Default: digits.", metavar="SPEC")
    ] = None,
    bundle: Bundle = None,
    strict: Strict = True,
    examples: Annotated[
        Path | None, typer.Option(help="Folder of example images; needs --model.", metavar="FOLDER")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    device: Device = "auto",
) -> None:
    """Try it in the browser: tilt an image, and compare five methods."""
    from headtilt.apps.playground.app import make_page, options
    from headtilt.apps.playground.methods import digits_stage, own_stage
    from headtilt.errors import OptionError
    from headtilt.model.device import limit_threads, resolve_device
    from headtilt.plot.style import need_matplotlib

    need_matplotlib()
    limit_threads()
    if model is None and (bundle is not None or examples is not None):
        raise OptionError("--bundle and --examples need a model. Add --model SPEC.")
    with progress() as tell:
        where = resolve_device(device)
        stage = digits_stage(tell) if model is None else own_stage(model, bundle, examples, where, strict=strict)
    page = make_page(stage)
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"playground at [bold]http://{host}:{port}[/bold]")
    page.launch(server_name=host, server_port=port, inbrowser=open_browser, **options())
