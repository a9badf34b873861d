"""A headless Chromium, driven over its DevTools protocol."""

import base64
import json
import os
import pathlib
import re
import struct
import subprocess
import tempfile
import threading
import zlib

import websocket

# Maximum time of one command of the protocol, in seconds.
LIMIT = 300
ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-lcd-text",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--force-device-scale-factor=1",
    "--lang=en-US",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
]
DOMAINS = ["Page", "Runtime", "Log", "Network", "DOM", "CSS"]
# The fonts that the browser may use. Other fonts of the machine would change the pictures.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <cachedir>CACHE</cachedir>
  <selectfont>
    <rejectfont><glob>*.*</glob></rejectfont>
    <acceptfont><glob>*/DejaVuSans.ttf</glob></acceptfont>
    <acceptfont><glob>*/DejaVuSans-Bold.ttf</glob></acceptfont>
  </selectfont>
  <match target="font">
    <edit name="antialias" mode="assign"><bool>true</bool></edit>
    <edit name="hinting" mode="assign"><bool>false</bool></edit>
    <edit name="autohint" mode="assign"><bool>false</bool></edit>
    <edit name="rgba" mode="assign"><const>none</const></edit>
  </match>
</fontconfig>
"""
# Returns the width, the height and the RGB bytes, in base64, of a PNG in base64.
PIXELS = """
(async (data) => {
  const image = new Image();
  image.src = 'data:image/png;base64,' + data;
  await image.decode();
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext('2d', { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const from = context.getImageData(0, 0, image.width, image.height).data;
  const rgb = new Uint8Array(image.width * image.height * 3);
  for (let to = 0; to < rgb.length; to++) rgb[to] = from[Math.floor(to / 3) * 4 + to % 3];
  let text = '';
  for (let at = 0; at < rgb.length; at += 3000)
    text += String.fromCharCode(...rgb.subarray(at, at + 3000));
  return [image.width, image.height, btoa(text)];
})
"""


class Browser:
    """A browser with one tab."""

    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        fonts = pathlib.Path(self.profile.name) / "fonts.conf"
        fonts.write_text(FONTS.replace("CACHE", f"{self.profile.name}/fonts"))
        self.process = subprocess.Popen(
            [program, *ARGUMENTS, f"--user-data-dir={self.profile.name}", "about:blank"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "FONTCONFIG_FILE": str(fonts)},
        )
        # If the browser ends without this line, the loop ends as well.
        found = None
        for line in self.process.stderr:
            found = re.search(r"DevTools listening on (ws://\S+)", line)
            if found:
                break
        if not found:
            raise RuntimeError(f"{program} did not start")
        # A browser whose pipe is full waits until someone reads.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.socket = websocket.create_connection(
            found[1], timeout=LIMIT, suppress_origin=True, enable_multithread=False
        )
        self.last = 0
        self.session = None
        self.events = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in DOMAINS:
            self.send(f"{domain}.enable")

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(LIMIT)
        self.process.stderr.close()
        self.profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def receive(self):
        message = json.loads(self.socket.recv())
        if "method" in message:
            self.events.append(message)
        return message

    def send(self, method, **parameters):
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            response = self.receive()
            if response.get("id") == self.last:
                break
        if "error" in response:
            raise RuntimeError(f"{method}: {response['error']}")
        return response["result"]

    def open(self, url):
        """Loads a page and deletes the events of earlier ones."""
        self.events.clear()
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def run(self, expression):
        """Returns the value of an expression, or of its promise."""
        response = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in response:
            raise RuntimeError(json.dumps(response["exceptionDetails"])[:2000])
        return response["result"].get("value")

    def press(self, key, code, text=""):
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def size(self, width, height):
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def media(self, kind="", **features):
        features = [{"name": name.replace("_", "-"), "value": features[name]} for name in features]
        self.send("Emulation.setEmulatedMedia", media=kind, features=features)

    def pixels(self, picture):
        """Returns the width, the height and the RGB bytes of a PNG."""
        encoded = base64.b64encode(picture).decode()
        width, height, pixels = self.run(f"{PIXELS}('{encoded}')")
        return width, height, base64.b64decode(pixels)

    def without_filters(self, picture):
        """Returns the same picture without PNG filters, which make pictures of texts larger."""
        width, height, pixels = self.pixels(picture)
        rows = (pixels[at : at + 3 * width] for at in range(0, len(pixels), 3 * width))
        data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in parts
        )

    def picture(self, width, height, scale):
        """Returns a PNG of the top of the page, or of the whole page if the height is None."""
        if height is None:
            height = self.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        response = self.send(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(response["data"])

    def fonts(self, selector):
        """Returns the names of the fonts of an element's texts."""
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        used = self.send("CSS.getPlatformFontsForNode", nodeId=node)["fonts"]
        return {font["familyName"] for font in used}

    def pdf(self):
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True)["data"])

    def errors(self):
        """Returns errors and warnings, dialogs, and requests for other documents than the page."""
        errors = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                errors.append(params["exceptionDetails"]["text"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                errors.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                errors.append(json.dumps(params["args"]))
            elif method == "Network.requestWillBeSent" and params.get("type") != "Document":
                errors.append(f"requests {params['request']['url'][:200]}")
            elif method == "Page.javascriptDialogOpening":
                errors.append(f"opens a dialog: {params['message']}")
        return errors
