"""Draw the rooms of `common` into docs/architecture.md from their imports: `python assets/draw_rooms.py`.

An arrow leads from a room to one that it imports; what follows from other arrows is left out.
"""

import importlib
import re
from pathlib import Path

import grimp
import networkx

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PICTURE = re.compile(r"(<!-- rooms -->\n).*?(<!-- /rooms -->)", re.DOTALL)


def picture() -> str:
    """Return the rooms as a Mermaid chart, the highest first; each with what it says of itself."""
    graph = grimp.build_graph("common")
    rooms = sorted(module for module in graph.find_children("common") if graph.find_children(module))
    imports = networkx.DiGraph()
    imports.add_nodes_from(rooms)
    for room in rooms:
        for module in graph.find_descendants(room):
            imported = set(graph.find_modules_directly_imported_by(module))
            imports.add_edges_from((room, other) for other in rooms if other != room and _is_within(imported, other))
    lines = ["```mermaid", "flowchart TD"]
    for room in networkx.lexicographical_topological_sort(imports):
        about = (importlib.import_module(room).__doc__ or "").splitlines()[0].rstrip(".")
        count = len(graph.find_descendants(room))
        modules = f"{count} module" + "s" * (count > 1)
        lines.append(f'    {_short(room)}["<b>{_short(room)}</b> ({modules})<br>{about}"]')
    arrows = networkx.transitive_reduction(imports).edges
    lines += [f"    {_short(room)} --> {_short(other)}" for room, other in sorted(arrows)]
    return "\n".join([*lines, "```", ""])


def _is_within(modules: set[str], room: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for name in modules)


def _short(room: str) -> str:
    return room.partition(".")[2]


def drawn(text: str) -> str:
    """Return the page's text with the picture in its place."""
    return PICTURE.sub(lambda found: found[1] + picture() + found[2], text)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
