"use strict";
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const told = document.getElementById("told");
  const layerChoice = document.getElementById("layer");
  const headChoice = document.getElementById("head");
  const BLOCK = 400; // tokens after which the text is laid out anew, at the end of a line
  const texts = [];

  // One text: its bits, its spans, and how many chosen heads keep and mark each token.
  const lay = async (own, section) => {
    const pieces = data.pieces.concat(own.more);
    const text = {
      own, pieces, count: pieces.length, width: Math.ceil(pieces.length / 8), section,
      kept: await unpack(own.kept),
      marked: own.marked === null ? null : await unpack(own.marked),
      score: own.score === null ? null : await unpack(own.score),
      keeps: new Uint16Array(pieces.length), marks: new Uint16Array(pieces.length),
      heads: 0, spans: [], at: -1,
    };
    const box = section.querySelector(".text");
    let block = document.createElement("div");
    pieces.forEach((piece, i) => {
      const span = document.createElement("span");
      span.textContent = piece.replace(/\n/g, "↵\n");
      text.spans.push(span);
      block.append(span);
      if (piece.includes("\n") && block.childElementCount >= BLOCK) {
        box.append(block);
        block = document.createElement("div");
      }
    });
    box.append(block);
    const index = new Map(text.spans.map((span, i) => [span, i]));
    box.addEventListener("mouseover", (event) => {
      if (index.has(event.target)) tell(text, index.get(event.target));
    });
    box.addEventListener("click", (event) => {
      if (index.has(event.target)) step(text, index.get(event.target));
    });
    box.addEventListener("keydown", (event) => {
      const line = Math.max(1, Math.round(box.clientWidth / 60));
      const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: line, ArrowUp: -line,
        PageDown: 20 * line, PageUp: -20 * line, Home: -text.count, End: text.count }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      step(text, Math.min(Math.max(text.at + by, 0), text.count - 1));
    });
    section.querySelector(".where").addEventListener("click", (event) => {
      const strip = event.currentTarget.getBoundingClientRect();
      const place = Math.floor(((event.clientX - strip.left) / strip.width) * text.count);
      step(text, Math.min(Math.max(place, 0), text.count - 1));
    });
    return text;
  };

  const count = (text) => {
    const layer = layerChoice.value, head = headChoice.value;
    text.keeps.fill(0);
    text.marks.fill(0);
    text.heads = 0;
    let start = 0;
    text.own.layers.forEach(([, heads], i) => {
      for (let j = 0; j < heads; j++, start += text.width) {
        if ((layer !== "" && Number(layer) !== i) || (head !== "" && Number(head) !== j)) continue;
        text.heads++;
        for (let t = 0; t < text.count; t++) {
          text.keeps[t] += (text.kept[start + (t >> 3)] >> (t & 7)) & 1;
          if (text.marked) text.marks[t] += (text.marked[start + (t >> 3)] >> (t & 7)) & 1;
        }
      }
    });
  };

  const shade = (text) => {
    count(text);
    const shown = text.own.mark === "read" ? text.marks : text.keeps;
    for (let t = 0; t < text.count; t++) {
      const classes = [`s${Math.ceil((8 * shown[t]) / Math.max(text.heads, 1))}`];
      if (!text.keeps[t]) classes.push("gone");
      if (text.marks[t] && text.own.mark !== "read") classes.push(text.own.mark, 2 * text.marks[t] >= text.heads ? "m2" : "m1");
      if (t >= text.own.prompt) classes.push("new");
      if (t === text.at) classes.push("at");
      text.spans[t].className = classes.join(" ");
    }
    const strip = text.section.querySelector(".where"), bars = Math.min(text.count, 160);
    strip.replaceChildren(...Array.from({ length: bars }, (_, i) => {
      const from = Math.floor((i * text.count) / bars), to = Math.floor(((i + 1) * text.count) / bars);
      const sum = shown.subarray(from, to).reduce((a, b) => a + b, 0);
      const bar = document.createElement("i");
      bar.style.height = `${(100 * sum) / Math.max((to - from) * text.heads, 1)}%`;
      return bar;
    }));
  };

  const words = { merged: "merged by", offloaded: "moved to host memory by", read: "read by" };
  const tell = (text, t) => {
    const share = Math.round((100 * text.keeps[t]) / Math.max(text.heads, 1));
    const parts = [`token ${t} ${JSON.stringify(text.pieces[t])}`,
      `kept by ${text.keeps[t]} of ${text.heads} heads (${share} %)`];
    if (text.own.mark) parts.push(`${words[text.own.mark]} ${text.marks[t]}`
      + (text.own.mark === "read" ? ` in the last ${text.own.reads} steps` : ""));
    if (text.score) parts.push(text.score[t] ? `score ${text.score[t]} of 255` : "never judged");
    if (texts.length > 1) parts.unshift(text.section.querySelector("h2").textContent);
    told.textContent = parts.join(" · ");
  };
  const step = (text, t) => {
    if (text.at >= 0) text.spans[text.at].classList.remove("at");
    text.at = t;
    text.spans[t].classList.add("at");
    text.spans[t].scrollIntoView({ block: "nearest" });
    tell(text, t);
  };

  const sections = document.querySelectorAll("section");
  for (let i = 0; i < data.texts.length; i++) texts.push(await lay(data.texts[i], sections[i]));
  const all = () => texts.forEach(shade);
  document.getElementById("switches").addEventListener("change", all);
  all();
  document.body.dataset.ready = "yes";
})();
