"""A Hub on this machine: as much of the protocol as the real client needs to push and pull models and datasets."""

import base64
import hashlib
import json
import os
import re
import secrets
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".parquet", ".safetensors", ".png")
# As on the Hub, a new repository has a first commit with this file.
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """A request that is refused: status, text for the user, and the code by which the client knows the reason."""

    def __init__(self, status: int, message: str, code: str | None = None, **more):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = {"error": message} | more


def git_hash(content: bytes) -> str:
    """The name of a file's content in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    part.write_bytes(content)
    os.replace(part, path)


class Repository:
    """
    A repository in a folder: `refs/NAME` holds the id of a branch's last commit, `commits/ID.json` a commit with all
    its files, `objects/ID` their contents, regular ones by their git hash and large ones by their sha256.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def exists(self) -> bool:
        return (self.folder / "refs").is_dir()

    def create(self) -> None:
        self.add_commit("main", "initial commit", {".gitattributes": self.add_regular(GITATTRIBUTES)})

    def resolve(self, revision: str) -> str:
        """The id of the commit that a branch or a commit id stands for."""
        ref = self.folder / "refs" / quote(revision, safe="")
        if ref.exists():
            return ref.read_text()
        if re.fullmatch("[0-9a-f]{40}", revision) and (self.folder / "commits" / f"{revision}.json").exists():
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, revision: str) -> dict:
        commit_id = self.resolve(revision)
        return json.loads((self.folder / "commits" / f"{commit_id}.json").read_text()) | {"id": commit_id}

    def files(self, revision: str = "main") -> dict[str, dict]:
        """Path -> object id, size and whether it is a large file."""
        return self.commit(revision)["files"]

    def add_commit(self, branch: str, title: str, files: dict[str, dict]) -> str:
        commit = {"title": title, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), "files": files}
        content = json.dumps(commit).encode()
        commit_id = hashlib.sha1(content).hexdigest()
        write_atomically(self.folder / "commits" / f"{commit_id}.json", content)
        write_atomically(self.folder / "refs" / quote(branch, safe=""), commit_id.encode())
        return commit_id

    def object_path(self, object_id: str) -> Path:
        return self.folder / "objects" / object_id

    def add_regular(self, content: bytes) -> dict:
        object_id = git_hash(content)
        write_atomically(self.object_path(object_id), content)
        return {"oid": object_id, "size": len(content), "lfs": False}

    def read(self, path: str, revision: str = "main") -> bytes:
        return self.object_path(self.files(revision)[path]["oid"]).read_bytes()


def changed_files(repository: Repository, files: dict[str, dict], operations: list[dict]) -> dict[str, dict]:
    """The files of a commit after the operations of the client."""
    files = dict(files)
    for operation in operations:
        key, value = operation["key"], operation["value"]
        path = value["path"]
        if key == "file":
            files[path] = repository.add_regular(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if not repository.object_path(value["oid"]).exists():
                raise HubError(400, f"{path} was never uploaded")
            files[path] = {"oid": value["oid"], "size": value["size"], "lfs": True}
        elif key in ("deletedFile", "deletedFolder"):
            gone = [name for name in files if name == path or name.startswith(path.rstrip("/") + "/")]
            if not gone:
                raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            files = {name: file for name, file in files.items() if name not in gone}
        else:
            raise HubError(400, f"unknown operation {key}")
    return files


def file_entry(path: str, file: dict) -> dict:
    """A file as the listings of the Hub describe it."""
    entry = {"type": "file", "path": path, "oid": file["oid"], "size": file["size"]}
    if file["lfs"]:
        pointer = (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{file['oid']}\nsize {file['size']}\n".encode()
        )
        entry["oid"] = git_hash(pointer)
        entry["lfs"] = {"oid": file["oid"], "size": file["size"], "pointerSize": len(pointer)}
    return entry


def entries(commit: dict, expand: bool) -> dict[str, dict]:
    """Path -> description of every file and folder of a commit."""
    found = {path: file_entry(path, file) for path, file in commit["files"].items()}
    folders = {str(folder) for path in found for folder in PurePosixPath(path).parents} - {"."}
    for folder in folders:
        inside = "".join(sorted(found[path]["oid"] for path in commit["files"] if path.startswith(f"{folder}/")))
        found[folder] = {"type": "directory", "path": folder, "oid": git_hash(inside.encode()), "size": 0}
    if expand:
        last = {"id": commit["id"], "title": commit["title"], "date": commit["date"]}
        found = {path: entry | {"lastCommit": last} for path, entry in found.items()}
    return dict(sorted(found.items()))


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last of a Range header; None without one."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if not match:
        return None
    start, stop = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    if start >= stop:
        raise HubError(416, "Range not satisfiable")
    return start, stop


API = r"/api/(?P<kind>models|datasets)/(?P<repo_id>[^/]+/[^/]+)"
URL = r"/(?P<kind>datasets/)?(?P<repo_id>[^/]+/[^/]+)"
# Method, address, the handler's method, and whether a token is needed.
ROUTES = [
    ("POST", "/api/repos/create", "create_repository", True),
    ("POST", "/api/validate-yaml", "validate_card", False),
    ("GET", f"{API}(/revision/(?P<revision>[^/]+))?", "describe", False),
    ("GET", f"{API}/tree/(?P<revision>[^/]+)(/(?P<path>.+))?", "list_tree", False),
    ("POST", f"{API}/paths-info/(?P<revision>[^/]+)", "list_paths", False),
    ("POST", f"{API}/preupload/(?P<revision>[^/]+)", "choose_upload_modes", True),
    ("POST", rf"{URL}\.git/info/lfs/objects/batch", "offer_uploads", True),
    ("PUT", "/upload/(?P<ticket>[0-9a-f]+)", "receive_object", False),  # who has a ticket had a token
    ("POST", f"{API}/commit/(?P<revision>[^/]+)", "add_commit", True),
    ("GET", f"{URL}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "send_file", False),
]


class Handler(BaseHTTPRequestHandler):
    """Answers one request; `self.server` is the HubServer."""

    protocol_version = "HTTP/1.1"
    # Head and body in one packet: apart, each answer would wait for the client's delayed acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def answer(self) -> None:
        self.body = self.read_body()  # also of refused requests: the connection is used again
        try:
            self.route()
        except HubError as error:
            self.send_json(error.answer, error.status, error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def route(self) -> None:
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query).items()}
        method = "GET" if self.command == "HEAD" else self.command
        for route_method, pattern, name, writes in ROUTES:
            match = re.fullmatch(pattern, address.path)
            if match and method == route_method:
                self.user = self.authenticate(writes)
                given = {key: value and unquote(value) for key, value in match.groupdict().items()}
                return getattr(self, name)(**given)
        raise HubError(404, f"{method} {address.path} is not part of this Hub")

    def authenticate(self, writes: bool) -> str | None:
        """The user whose token was sent; None for a reader without one."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        if writes and not token:
            raise HubError(401, "Invalid username or password.")
        return self.server.tokens.get(token)

    def repository(self, kind: str | None, repo_id: str) -> Repository:
        repository = self.server.repository(repo_id, "datasets" if kind and kind.startswith("datasets") else "models")
        if not repository.exists():
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def create_repository(self) -> None:
        given = json.loads(self.body)
        repo_id = f"{given.get('organization') or self.user}/{given['name']}"
        kind = f"{given.get('type') or 'model'}s"
        url = f"{self.server.url}/{'datasets/' if kind == 'datasets' else ''}{repo_id}"
        with self.server.lock:
            repository = self.server.repository(repo_id, kind)
            if repository.exists():
                raise HubError(409, "You already created this repository", url=url)
            repository.create()
        self.send_json({"url": url, "name": repo_id})

    def validate_card(self) -> None:
        content = json.loads(self.body)["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            raise HubError(400, "Invalid metadata", errors=[{"message": str(error)}], warnings=[]) from error
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self.send_json({"errors": [], "warnings": warnings})

    def describe(self, kind: str, repo_id: str, revision: str | None) -> None:
        commit = self.repository(kind, repo_id).commit(revision or "main")
        siblings = [{"rfilename": path} for path in commit["files"]]
        facts = {"id": repo_id, "sha": commit["id"], "lastModified": commit["date"], "siblings": siblings}
        self.send_json(facts | {"private": False, "tags": [], "downloads": 0, "likes": 0})

    def list_tree(self, kind: str, repo_id: str, revision: str, path: str | None) -> None:
        commit = self.repository(kind, repo_id).commit(revision)
        found = entries(commit, self.is_set("expand"))
        if path and path not in found:
            raise HubError(404, f"{path} does not exist", "EntryNotFound")
        folder = PurePosixPath(path or ".")
        inside = [entry for name, entry in found.items() if folder in PurePosixPath(name).parents]
        if not self.is_set("recursive"):
            inside = [entry for entry in inside if PurePosixPath(entry["path"]).parent == folder]
        self.send_json(inside)

    def list_paths(self, kind: str, repo_id: str, revision: str) -> None:
        form = parse_qs(self.body.decode())
        expand = form.get("expand", ["false"])[0].lower() == "true"
        found = entries(self.repository(kind, repo_id).commit(revision), expand)
        self.send_json([found[path] for path in form.get("paths", []) if path in found])

    def choose_upload_modes(self, kind: str, repo_id: str, revision: str) -> None:
        there = self.repository(kind, repo_id).files(revision)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": there.get(file["path"], {}).get("oid"),
            }
            for file in json.loads(self.body)["files"]
        ]
        self.send_json({"files": modes})

    def offer_uploads(self, kind: str | None, repo_id: str) -> None:
        repository, answers = self.repository(kind, repo_id), []
        for wanted in json.loads(self.body)["objects"]:
            answers.append({"oid": wanted["oid"], "size": wanted["size"]})
            path = repository.object_path(wanted["oid"])
            if not path.exists():
                upload = {"href": f"{self.server.url}/upload/{self.server.new_ticket(path)}"}
                answers[-1]["actions"] = {"upload": upload}
        self.send_json({"transfer": "basic", "objects": answers})

    def receive_object(self, ticket: str) -> None:
        path = self.server.tickets.get(ticket)
        if path is None:
            raise HubError(403, "This upload was not offered")
        if hashlib.sha256(self.body).hexdigest() != path.name:
            raise HubError(400, "The content does not have the announced sha256")
        write_atomically(path, self.body)
        self.send_json({})

    def add_commit(self, kind: str, repo_id: str, revision: str) -> None:
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        repository = self.repository(kind, repo_id)
        with self.server.lock:
            parent = repository.commit(revision)
            if header["value"].get("parentCommit") not in (None, parent["id"]):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = changed_files(repository, parent["files"], operations)
            commit_id = repository.add_commit(revision, header["value"]["summary"], files)
        prefix = "datasets/" if kind == "datasets" else ""
        url = f"{self.server.url}/{prefix}{repo_id}/commit/{commit_id}"
        self.send_json({"success": True, "commitOid": commit_id, "commitUrl": url, "hookOutput": ""})

    def send_file(self, kind: str | None, repo_id: str, revision: str, path: str) -> None:
        repository = self.repository(kind, repo_id)
        commit = repository.commit(revision)
        headers = {"X-Repo-Commit": commit["id"], "Accept-Ranges": "bytes"}
        if path not in commit["files"]:
            error = HubError(404, "Entry not found", "EntryNotFound")
            error.headers |= headers
            raise error
        content = repository.read(path, commit["id"])
        headers |= {"ETag": f'"{commit["files"][path]["oid"]}"', "Content-Type": "application/octet-stream"}
        part = byte_range(self.headers.get("Range"), len(content))
        if part is None:
            return self.send(content, 200, headers)
        start, stop = part
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self.send(content[start:stop], 206, headers)

    def is_set(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("true", "1")

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send_json(self, answer, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(answer).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        """Says nothing: the client's errors are what the tests look at."""


class HubServer(ThreadingHTTPServer):
    """
    Serves while its context is open; all repositories are in `folder`.

    Args:
        folder: Where repositories are kept: `KIND/OWNER/NAME`, with KIND `models` or `datasets`.
        tokens: The tokens that may write -> the names of their users.
    """

    daemon_threads = True

    def __init__(self, folder: Path, tokens: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = Path(folder)
        self.tokens = tokens
        self.tickets: dict[str, Path] = {}
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()

    def repository(self, repo_id: str, kind: str = "models") -> Repository:
        owner, name = repo_id.split("/")
        if not all(re.fullmatch(r"\w[\w.-]*", part) for part in (owner, name)):
            raise HubError(400, f"{repo_id} is not a name of a repository")
        return Repository(self.folder / kind / owner / name)

    def new_ticket(self, path: Path) -> str:
        """A secret under which the object at `path` may be uploaded: uploads of large files carry no token."""
        ticket = secrets.token_hex(16)
        self.tickets[ticket] = path
        return ticket
