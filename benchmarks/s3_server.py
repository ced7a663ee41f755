"""A server of objects that speaks as much of S3 as a checkpoint needs, for benchmarks.

Correctness is tested with moto's server. That one copies an object whole for every range that is
read of it, so that it would be measured, not the client; this one keeps buffers and sends slices.

    python benchmarks/s3_server.py  # prints its port; ends with its standard input
"""

import hashlib
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Objects:
    """What the server holds: an object is its parts, so that none is copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[str, list[bytearray]] = {}
        self.tags: dict[str, str] = {}
        self.uploads: dict[str, dict[int, bytearray]] = {}
        self.number = 0

    def put(self, key: str, parts: list[bytearray], tag: str) -> None:
        self.parts[key], self.tags[key] = parts, tag

    def remove(self, key: str) -> None:
        self.parts.pop(key, None)
        self.tags.pop(key, None)


class Handler(BaseHTTPRequestHandler):
    """One connection; every answer has a length, so that it stays open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects = Objects()

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def asked(self) -> tuple[str, dict[str, list[str]]]:
        url = urlsplit(self.path)
        return unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)

    def body(self) -> bytearray:
        memory = bytearray(int(self.headers.get("Content-Length", 0)))
        view = memoryview(memory)
        while len(view):
            view = view[self.rfile.readinto(view) :]
        return memory

    def do_PUT(self) -> None:
        key, query = self.asked()
        data, objects = self.body(), self.objects
        if "uploadId" in query:
            tag = f'"{id(data):x}"'
            objects.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
            self.answer(200, ETag=tag)
            return
        tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        with objects.lock:
            there = objects.tags.get(key)
            missed = self.headers.get("If-None-Match") == "*" and there is not None
            missed |= self.headers.get("If-Match", there) != there
            if not missed:
                objects.put(key, [data], tag)
        self.answer(412 if missed else 200, ETag=tag)

    def do_POST(self) -> None:
        key, query = self.asked()
        text, objects = bytes(self.body()).decode(), self.objects
        if "uploads" in query:
            with objects.lock:
                objects.number += 1
                number = str(objects.number)
            objects.uploads[number] = {}
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>{escape(key)}"
                f"</Key><UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        elif "uploadId" in query:
            number = query["uploadId"][0]
            parts = objects.uploads.pop(number)
            objects.put(key, [parts[i] for i in sorted(parts)], f'"{number}-{len(parts)}"')
            self.answer(
                200,
                f"<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>{escape(key)}"
                f"</Key><ETag>&quot;{number}-{len(parts)}&quot;</ETag>"
                "</CompleteMultipartUploadResult>".encode(),
            )
        else:
            bucket = key.split("/")[0]
            names = re.findall(r"<Key>(.*?)</Key>", text)
            for name in names:
                objects.remove(f"{bucket}/{unquote(name)}")
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self) -> None:
        key, query = self.asked()
        if "uploadId" in query:
            self.objects.uploads.pop(query["uploadId"][0], None)
        else:
            self.objects.remove(key)
        self.answer(204)

    def do_HEAD(self) -> None:
        self.send_object(body=False)

    def do_GET(self) -> None:
        key, query = self.asked()
        if "list-type" not in query:
            self.send_object(body=True)
            return
        prefix = f"{key}/{query.get('prefix', [''])[0]}"
        rows = "".join(
            f"<Contents><Key>{escape(name.partition('/')[2])}</Key>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag>"
            f"<Size>{sum(map(len, parts))}</Size></Contents>"
            for name, parts in sorted(self.objects.parts.items())
            if name.startswith(prefix)
        )
        self.answer(
            200,
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode(),
        )

    def send_object(self, *, body: bool) -> None:
        key, _ = self.asked()
        parts = self.objects.parts.get(key)
        if parts is None:
            self.answer(404)
            return
        ends = list(accumulate(map(len, parts)))
        total, tag = ends[-1] if ends else 0, self.objects.tags[key]
        begin, end, status = 0, total, 200
        headers = {"ETag": tag, "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if asked := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, status = int(asked[1]), 206
            end = min(total, int(asked[2] or total) + 1)
            if begin >= total:
                self.answer(416)
                return
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{total}"
        self.answer(status, Content_Length=str(end - begin), **headers)
        for part, stop in zip(parts, ends, strict=True):
            start = stop - len(part)
            if body and stop > begin and start < end:
                view = memoryview(part)[max(0, begin - start) : end - start]
                self.wfile.write(view)


def main() -> int:
    """Serve until the standard input ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
