"""Has links of the documents that lead out of docs/ point at the repository."""

import os
import posixpath
import re

LINK = re.compile(r"\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown, page, config, files):
    """mkdocs calls this with each page before it is rendered."""

    def outside(match):
        folder = posixpath.dirname(page.file.src_uri)
        target = posixpath.normpath(posixpath.join("docs", folder, match.group(1)))
        if target.startswith("docs/"):
            return match.group(0)
        root = os.path.dirname(config["docs_dir"])
        kind = "tree" if os.path.isdir(os.path.join(root, target)) else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target}{match.group(2) or ''})"

    return LINK.sub(outside, markdown)
