"""Pages of the service for people: where to look, and its documentation, which loads nothing from elsewhere."""

from __future__ import annotations

import html
from typing import Any

STYLE = """
:root {color-scheme: light dark;}
body {font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;}
h1 {font-size: 1.6rem;} h2 {font-size: 1.1rem; margin: 2rem 0 .3rem;} p {margin: .3rem 0;}
code, pre {font-family: ui-monospace, monospace; font-size: .88rem;}
pre {overflow-x: auto; padding: .7rem; border: 1px solid #8888; border-radius: 8px;}
table {border-collapse: collapse; width: 100%;} td {padding: .15rem .8rem .15rem 0; vertical-align: top;}
b.method {color: #0072b2;}
"""


def directory(model: str) -> dict[str, Any]:
    """Return what the service answers to ``/``: where to look."""
    return {
        "service": "headtilt",
        "model": model,
        "docs": "/docs",
        "openapi": "/openapi.json",
        "classify": "POST an image to /classify; ?topk=3 gives the three best labels",
        "explain": "POST an image to /explain; ?format=png draws the search",
        "health": ["/healthz", "/readyz", "/metrics"],
    }


def documentation(schema: dict[str, Any], model: str, address: str) -> str:
    """Return the documentation as HTML, from what OpenAPI says of the service.

    Args:
        schema: The service's OpenAPI.
        model: What it calls its model.
        address: Where it is, for the examples.
    """
    parts = []
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            parts.append(f'<h2><b class="method">{method.upper()}</b> <code>{html.escape(path)}</code></h2>')
            parts.append(f"<p>{html.escape(about.get('description') or about.get('summary') or '')}</p>")
            parts.append(_example(method, path, address))
            parts.append(_table({one["name"]: one.get("description", "") for one in about.get("parameters", [])}))
            replies = about.get("responses", {})
            parts.append(_table({status: reply.get("description", "") for status, reply in replies.items()}))
    title = f"{html.escape(schema['info']['title'])} {html.escape(schema['info']['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>Model: <b>{html.escape(model)}</b>. All of this as OpenAPI: "
        f'<a href="/openapi.json">/openapi.json</a>.</p>{"".join(parts)}</body></html>'
    )


def _example(method: str, path: str, address: str) -> str:
    if method != "post":
        return f"<pre>curl {html.escape(address + path)}</pre>"
    sent = f"curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' '{address}{path}'"
    return f"<pre>{html.escape(sent)}</pre>"


def _table(rows: dict[str, str]) -> str:
    if not rows:
        return ""
    cells = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(text)}</td></tr>" for name, text in rows.items()
    )
    return f"<table>{cells}</table>"
