"""Write the README's generated table of images: `python -m builder.readme`."""

import re

from builder import flow
from builder.show import markdown_rows


def main() -> None:
    """Replace what stands between the two marks."""
    project = flow.Project.find()
    path = project.root / "README.md"
    rows = markdown_rows(flow.locked_rows(project))
    text = re.sub(
        r"(<!-- rows[^\n]*-->\n).*?(<!-- /rows -->)",
        lambda m: f"{m[1]}{rows}{m[2]}",
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
