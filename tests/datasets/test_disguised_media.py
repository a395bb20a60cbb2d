"""Playlists, session descriptions and scripts named as films and sounds reach nothing else.

They are read in a process that the kernel ends where it makes a socket or opens a file.
"""

import platform
import struct
import sys

import pytest
from tests.datasets.film_files import film, sound_alone
from tests.programs import run_python

from lightrft.engines.media.containers import BEGINNINGS, demuxer_of

# open, openat, openat2, creat, socket, connect, bind
CALLS = {"x86_64": (2, 257, 437, 85, 41, 42, 49), "aarch64": (56, 437, 198, 203, 200)}
GUARDED = """
import ctypes, io, os, struct, sys
from pathlib import Path
import av
from lightrft.engines.media.films import film_size, read_film
from lightrft.engines.media.files import MediaError
from lightrft.engines.media.sounds import SoundSource

def as_film(content):
    film_size(content, "a.mp4")
    read_film(content, "a.mp4")

def as_sound(content):
    SoundSource("a.wav", content=content).decode()

def guessed(content):
    av.open(io.BytesIO(content), "r").close()

def guard(calls):
    # The number of the call; one jump for each, then allow, and to kill the process.
    lines = [(0x20, 0, 0, 0)]
    lines += [(0x15, len(calls) - i, 0, call) for i, call in enumerate(calls)]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x80000000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in lines))
    program = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):
        print("no guard", os.strerror(ctypes.get_errno()))
        sys.exit(0)

folder, calls, readers = Path(sys.argv[1]), eval(sys.argv[2]), sys.argv[3].split(",")
os.chdir(folder)
for warm in ("film.mp4", "film.mkv", "sound.ogg"):
    for reader in (as_film, as_sound):
        try:
            reader((folder / warm).read_bytes())
        except MediaError:
            pass
files = {path.name: path.read_bytes() for path in sorted((folder / "tried").iterdir())}
guard(calls)
for name, content in files.items():
    for reader in readers:
        os.write(1, f"{name} {reader}: ".encode())
        try:
            globals()[reader](content)
            os.write(1, b"read\\n")
        except MediaError as error:
            os.write(1, f"{error}\\n".encode())
print("all tried")
"""
SDP = """v=0
o=- 0 0 IN IP4 127.0.0.1
s=x
c=IN IP4 127.0.0.1
t=0 0
m=video 40404 RTP/AVP 96
a=rtpmap:96 H264/90000
"""


def tag(content, size=0):
    """Contents behind a tag of ID3."""
    return b"ID3\x04\0\0" + bytes((0, 0, size >> 7, size & 127)) + b"\0" * size + content


def atom(kind, content):
    return struct.pack(">I", 8 + len(content)) + kind + content


def reference(name):
    """A film whose samples lie in another file, as QuickTime refers to it."""
    content = film("mp4", num_frames=2)
    place = content.index(b"url \0\0\0\1") - 4
    other = atom(b"url ", b"\0\0\0\0" + name.encode() + b"\0")
    grown = len(other) - 12
    made = content[:place] + other + content[place + 12 :]
    # The atoms around it are as much longer.
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        at = made.index(kind) - 4
        size = struct.unpack(">I", made[at : at + 4])[0] + grown
        made = made[:at] + struct.pack(">I", size) + made[at + 4 :]
    return made


def disguises(folder):
    """Contents by name; those that name a file name one that is there."""
    near, far = "film.mp4", folder / "film.mp4"
    port = "http://127.0.0.1:40404/a.ts"
    hls = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
    key = '#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXT-X-KEY:METHOD=AES-128,URI="{}"\n#EXTINF:1,\na.ts\n'
    dash = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" '
        'mediaPresentationDuration="PT1S"><Period><AdaptationSet mimeType="video/mp4">'
        '<Representation id="1" bandwidth="1"><BaseURL>{}</BaseURL></Representation>'
        "</AdaptationSet></Period></MPD>"
    )
    texts = {
        "sdp": SDP,
        "concat": f"ffconcat version 1.0\nfile {near}\n",
        "concat-old": f"file '{near}'\n",
        "hls": hls.format(near),
        "hls-key": key.format(far),
        "dash": dash.format(near),
        "dash-address": dash.format(port),
        "smooth": f'<SmoothStreamingMedia MajorVersion="2" Url="{port}"/>',
        "asx": f'<asx version="3.0"><entry><ref href="{port}"/></entry></asx>',
        "asf-reference": f"[Reference]\nRef1={port}\n",
        "playlist": f"[playlist]\nFile1={near}\nNumberOfEntries=1\nVersion=2\n",
        "rtsp": "RTSPtextRTSP://127.0.0.1:40404/a\n",
        "webvtt": "WEBVTT\n\n00:00.000 --> 00:01.000\nx\n",
        "srt": "1\n00:00:00,000 --> 00:00:01,000\nx\n",
        "ass": "[Script Info]\nScriptType: v4.00+\n[Events]\n",
        "lrc": "[00:01.00]x\n[00:02.00]y\n",
        "sub": "{0}{25}x\n{25}{50}y\n",
        "vobsub": "# VobSub index file, v7\nid: en, index: 0\ntimestamp: 00:00:00:000\n",
        "metadata": ";FFMETADATA1\ntitle=x\n",
        "cue": f'FILE "{near}" MP4\n  TRACK 01 AUDIO\n',
        "pls-xspf": f'<?xml version="1.0"?><playlist><location>{port}</location></playlist>',
        "imf": '<?xml version="1.0"?><CompositionPlaylist xmlns="x"><Id>urn:uuid:1</Id>'
        "</CompositionPlaylist>",
        "framehash": "#format: frame checksums\n#version: 2\n",
    }
    made = {name: text.encode() for name, text in texts.items()}
    for name in ("sdp", "concat", "hls"):
        made |= {
            f"tagged-{name}": tag(made[name]),
            f"tagged-far-{name}": tag(made[name], 4000),
            f"bom-{name}": b"\xef\xbb\xbf" + made[name],
            f"riff-{name}": b"RIFF\0\0\0\x40AVI " + made[name],
            f"wave-{name}": b"RIFF\xff\xff\xff\xffWAVE" + made[name],
            f"matroska-{name}": b"\x1a\x45\xdf\xa3" + made[name],
            f"mov-{name}": atom(b"free", made[name]),
            f"ogg-{name}": b"OggS" + made[name],
            f"flac-{name}": b"fLaC" + made[name],
            f"mp3-{name}": b"\xff\xfb" + made[name],
        }
    made |= {
        f"reference-{i}": reference(n) for i, n in enumerate((str(far), f"file://{far}", port))
    }
    return made


def tried(folder, contents, readers="as_film,as_sound"):
    """Exit status and lines of a process that reads the contents, and may open nothing."""
    (folder / "film.mp4").write_bytes(film("mp4"))
    (folder / "film.mkv").write_bytes(film("mkv", sound=True))
    (folder / "sound.ogg").write_bytes(sound_alone())
    (folder / "tried").mkdir()
    for name, content in contents.items():
        (folder / "tried" / name).write_bytes(content)
    calls = CALLS.get(platform.machine())
    if calls is None or sys.platform != "linux":
        pytest.skip("the numbers of system calls are those of Linux on x86-64 and ARM")
    done = run_python("-c", GUARDED, str(folder), repr(calls), readers)
    if "no guard" in done.stdout:
        pytest.skip(f"the kernel takes no filter of system calls: {done.stdout}")
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_disguised_files_open_no_socket_and_no_other_file(tmp_path):
    contents = disguises(tmp_path)
    assert len(contents) >= 50
    code, lines, errors = tried(tmp_path, contents)
    assert (code, lines[-1:]) == (0, ["all tried"]), f"ended in {lines[-1:]}: {errors}"
    assert len(lines) == 2 * len(contents) + 1
    # The references have pictures of their own beside what they name.
    assert [line for line in lines if line.endswith(": read") and "reference" not in line] == []


@pytest.mark.parametrize("name", ["sdp", "concat"])
def test_the_guard_ends_what_ffmpeg_would_make_of_them(name, tmp_path):
    code, lines, _ = tried(tmp_path, {name: disguises(tmp_path)[name]}, "guessed")
    assert code != 0
    assert lines == [f"{name} guessed: "]


def test_unknown_bytes_are_refused_before_anything_is_opened(tmp_path):
    _, lines, _ = tried(tmp_path, {"sdp": SDP.encode(), "text": b"hello, this is a text"})
    for line in lines[:-1]:
        assert "or none: its first bytes are those of no known format (mov, matroska" in line


def test_the_first_bytes_name_one_demuxer():
    known = {"mp4": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska", "avi": "avi"}
    assert {suffix: demuxer_of(film(suffix, num_frames=2)) for suffix in known} == known
    assert demuxer_of(tag(b"\xff\xf1")) == "aac"
    assert demuxer_of(tag(tag(b"\xff\xfb", 300), 10)) == "mp3"
    assert demuxer_of(tag(b"\0\0\0")) == "mp3"
    assert demuxer_of((b"G" + bytes(187)) * 2) == "mpegts"
    for other in (b"", b"G", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"\xff\xd8\xff", b"ID3"):
        assert demuxer_of(other) is None


@pytest.mark.parametrize(
    "content, demuxer",
    [
        (bytes(500) + b"\xff\xfb", "mp3"),
        (bytes(10) + b"\xff\xf1", "aac"),
        (b"ID3\4\0\x10\0\0\0\2xx" + b"3DI\4\0\x10\0\0\0\2" + b"fLaC", "flac"),
        ((bytes(4) + b"G" + bytes(187)) * 3, "mpegts"),
        ((b"G" + bytes(203)) * 2, "mpegts"),
        (b"\0\0\0\x18stypmsdh", "mov"),
        (b"\0\0\0\x18uuid", "mov"),
        (b"\0\0\x01\xb3", "mpegvideo"),
        (b"BW64\xff\xff\xff\xffWAVE", "wav"),
        (b"riff\x2e\x91\xcf\x11", "w64"),
        (b"caff\0\1\0\0desc", "caf"),
        (b"#!AMR-WB\n", "amr"),
        (b"wvpk", "wv"),
        (b"RIFFG\0\0\0WAVEfmt " + bytes(180) + b"G", "wav"),
        (bytes(5000), None),
    ],
)
def test_recordings_of_cameras_phones_and_broadcasts_are_known(content, demuxer):
    assert demuxer_of(content) == demuxer


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_every_demuxer_that_is_named_is_one_of_ffmpegs(kind):
    import av

    assert kind in av.ContainerFormat(kind, "r").name.split(",")
