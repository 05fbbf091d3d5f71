"""What a page may do in the browser."""

import base64
import hashlib
import re

# The live page may also ask its server, and show the pictures that it contains.
LIVE_PAGE_POLICY = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def content_security_policy(page: str) -> str:
    """Build the start of a policy that allows only the page's own scripts and styles, by hash."""
    hashes = {"style": "", "script": ""}
    for kind, content in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind] += f" 'sha256-{digest}'"
    return f"default-src 'none'; style-src{hashes['style']}; script-src{hashes['script']}"


def live_page_headers(page: str) -> dict[str, str]:
    """Build the HTTP headers of every response of the live page's server."""
    return {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Content-Security-Policy": f"{content_security_policy(page)}; {LIVE_PAGE_POLICY}",
    }
