#!/usr/bin/env python3
"""Draws what nvb_graph_describe writes as DOT: an SVG of boxes in layers, without Graphviz.

    tools/graph_picture.py < graph.dot > graph.svg

A node stands one layer below the lowest node that it runs after. Edges that other edges imply are left out, as the list has them
for whoever orders operations and not for who looks at them.
"""

import html
import re
import sys

NODE = re.compile(r'^\s*n(\d+) \[label="((?:[^"\\]|\\.)*)"\];$')
EDGE = re.compile(r"^\s*n(\d+) -> n(\d+);$")
LINE, PADDING, GAP, CHARACTER = 15, 8, 26, 6.7


def read(text):
    """The lines of each node's label, and for each node those that it runs after."""
    labels, after = {}, {}
    for line in text.splitlines():
        if node := NODE.match(line):
            labels[int(node[1])] = node[2].split("\\n")
            after.setdefault(int(node[1]), set())
        elif edge := EDGE.match(line):
            after.setdefault(int(edge[2]), set()).add(int(edge[1]))
        elif line.strip() not in ("", "digraph nvbackend {", "node [shape=box];", "}"):
            sys.exit(f"graph_picture: this line is none of nvb_graph_describe's: {line}")
    if unknown := {earlier for all in after.values() for earlier in all} - set(labels):
        sys.exit(f"graph_picture: edges name nodes that are not there: {sorted(unknown)}")
    return labels, after


def reduced(after):
    """Without the edges that longer ways imply; nodes come in the order of their numbers."""
    ancestors = {}
    for node in sorted(after):
        ancestors[node] = set(after[node]).union(*(ancestors[earlier] for earlier in after[node]))
    return {node: {earlier for earlier in all if not any(earlier in ancestors[other] for other in all)}
            for node, all in after.items()}


def picture(labels, after):
    after = reduced(after)
    layer = {}
    for node in sorted(labels):
        layer[node] = 1 + max((layer[earlier] for earlier in after[node]), default=-1)
    size = {node: (2 * PADDING + CHARACTER * max(map(len, lines)), 2 * PADDING + LINE * len(lines))
            for node, lines in labels.items()}
    rows = [[node for node in sorted(labels) if layer[node] == row] for row in range(1 + max(layer.values(), default=-1))]
    width = max((sum(size[node][0] + GAP for node in row) for row in rows), default=0) + GAP
    place, top = {}, GAP
    for row in rows:
        left = (width - sum(size[node][0] + GAP for node in row) + GAP) / 2
        for node in row:
            place[node] = (left, top)
            left += size[node][0] + GAP
        top += max(size[node][1] for node in row) + GAP
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}" font-family="monospace" font-size="11">',
           f'<rect width="{width:.0f}" height="{top:.0f}" fill="#ffffff"/>']
    for node in sorted(labels):
        for earlier in sorted(after[node]):
            x1, y1 = place[earlier][0] + size[earlier][0] / 2, place[earlier][1] + size[earlier][1]
            x2, y2 = place[node][0] + size[node][0] / 2, place[node][1]
            middle = (y1 + y2) / 2
            out.append(f'<path d="M{x1:.1f} {y1:.1f} C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}" '
                       'fill="none" stroke="#6b7280"/>')
    for node, lines in sorted(labels.items()):
        (x, y), (w, h) = place[node], size[node]
        out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="4" fill="#eef2ff" stroke="#4f46e5"/>')
        for index, line in enumerate(lines):
            weight = ' font-weight="bold"' if index == 0 else ""
            out.append(f'<text x="{x + PADDING:.1f}" y="{y + PADDING + LINE * (index + 0.75):.1f}"{weight} fill="#111827">'
                       f"{html.escape(line)}</text>")
    return "\n".join(out + ["</svg>", ""])


if __name__ == "__main__":
    sys.stdout.write(picture(*read(sys.stdin.read())))
