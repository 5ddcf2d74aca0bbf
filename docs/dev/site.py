"""Adds the references of the client libraries to the site, and points links that lead out of docs/ at the repository."""

import os
import posixpath
import re

import pypandoc
from mkdocs.structure.files import File

# Pages of the site that are made from files outside of docs/.
PYTHON = {"client/python/README.md": "reference/python.md"}
MANUALS = {
    f"client/c/{name}.3": f"reference/{name}.md" for name in ("gaia_mmap", "gaia_mview", "gaia_use", "gaia_group_begin")
}
ORIGINS = {page: origin for origin, page in (PYTHON | MANUALS).items()}

LINK = re.compile(r"\]\(((?![a-z]+:)[^)#\s]+)(#[^)]*)?\)")
REFERENCE = re.compile(r"\*\*(gaia_\w+)\*\*\((\d)\)")


def on_files(files, config):
    """mkdocs calls this once it has found the files of docs/."""
    root = os.path.dirname(config["docs_dir"])
    for origin, page in PYTHON.items():
        with open(os.path.join(root, origin), encoding="utf-8") as f:
            files.append(File.generated(config, page, content=f.read()))
    described = {}
    texts = {}
    for origin, page in MANUALS.items():
        text = pypandoc.convert_file(os.path.join(root, origin), "gfm", format="man", extra_args=["--wrap=none"])
        names = text.split("\n\n", 2)[1].split(" - ")[0]
        described.update(dict.fromkeys(re.findall(r"gaia_\w+", names), page))
        texts[page] = text
    for page, text in texts.items():
        # The page's headings are sections of a manual, in capitals. Its title is its name.
        text = re.sub(r"^#(#?) ([A-Z])(.*)$", lambda m: f"#{m[1]}# {m[2]}{m[3].lower()}", text, flags=re.M)
        text = REFERENCE.sub(lambda m: linked(m, page, described), text)
        title = posixpath.basename(page).removesuffix(".md")
        files.append(File.generated(config, page, content=f"# {title}(3)\n\n{text}"))
    return files


def linked(match, page, described):
    """Returns a reference to a function of the C library as a link, if another page of the site describes it."""
    target = described.get(match[1])
    if target is None or target == page:
        return match[0]
    return f"[**{match[1]}**({match[2]})]({posixpath.basename(target)})"


def on_page_markdown(markdown, page, config, files):
    """mkdocs calls this with each page before it is rendered."""
    at = page.file.src_uri
    origin = ORIGINS.get(at, f"docs/{at}")
    if at in ORIGINS and origin.endswith(".3"):
        return markdown
    root = os.path.dirname(config["docs_dir"])

    def moved(match):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        anchor = match[2] or ""
        inside = PYTHON.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if inside:
            return f"]({posixpath.relpath(inside, posixpath.dirname(at) or '.')}{anchor})"
        kind = "tree" if os.path.isdir(os.path.join(root, target)) else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target}{anchor})"

    return LINK.sub(moved, markdown)
