// The trace player: plays a film of the real scheduler, frame by frame.
// Gets plain data (see player.py) and draws it; decides nothing.

const SLOT = 46, HEIGHT = 34, GAP = 14, LEFT = 4, CAPTION = 14, ROW = 60;
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, text = null, kind = null) {
  const made = kind ? document.createElementNS(kind, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

const shape = (name, attributes, text = null) => node(name, attributes, text, SVG);

// Colours by holder, as in the still pictures.
function paint(film, block) {
  if (block.holders.length === 0) return film.cached;
  return block.holders.length > 1 ? film.shared : film.colours[block.holders[0]];
}

function caption(block) {
  const idle = block.hash ? "cached, free" : "free";
  return `${block.id}  ${block.holders.join(" + ") || idle}`;
}

function drawBlock(film, frame, block, x, y) {
  const [strong, tint] = paint(film, block);
  const acted = frame.acted.includes(block.id);
  const group = shape("g", { class: "block", "data-block": block.id, tabindex: 0 });
  const ink = block.holders.length ? strong : "#666666";
  group.append(shape("text", { x: x + 2, y: y + 10, "font-size": 11, "font-weight": "bold", fill: ink }, caption(block)));
  for (let i = 0; i < film.block_size; i++) {
    const word = block.words[i];
    const fill = word === undefined ? "#ffffff" : tint;
    group.append(shape("rect", { x: x + i * SLOT, y: y + CAPTION, width: SLOT, height: HEIGHT, fill, stroke: "#bbbbbb" }));
    if (!word) continue;
    const size = word.length < 7 ? 12 : word.length < 9 ? 10 : 8;
    group.append(shape("text", { x: x + (i + 0.5) * SLOT, y: y + CAPTION + 21, "font-size": size, "text-anchor": "middle", fill: "#222222" }, word));
  }
  group.append(shape("rect", { x, y: y + CAPTION, width: film.block_size * SLOT, height: HEIGHT, rx: 4, fill: "none", stroke: acted ? "#000000" : strong, "stroke-width": acted ? 3 : 1.5 }));
  return group;
}

function drawFrame(film, frame) {
  const columns = Math.max(1, Math.min(5, Math.floor(20 / film.block_size)));
  const width = 2 * LEFT + columns * (film.block_size * SLOT + GAP) - GAP;
  const rows = Math.ceil(frame.blocks.length / columns);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${rows * ROW}`, width, role: "img" });
  frame.blocks.forEach((block, i) => {
    const x = LEFT + (i % columns) * (film.block_size * SLOT + GAP);
    svg.append(drawBlock(film, frame, block, x, Math.floor(i / columns) * ROW));
  });
  return svg;
}

// The line that last touched a block, at or before frame `at`.
function lastTouch(film, at, id) {
  for (let i = at; i >= 0; i--) if (film.frames[i].acted.includes(id)) return film.frames[i];
  return null;
}

function describeLine(frame) {
  const { file, number, text, calls } = frame.line;
  return `${frame.text}\n${calls.join(" → ")}\n${file}:${number}   ${text}`;
}

function describeChain(block) {
  if (!block.chain.length) return `block ${block.id} is not in the prefix index`;
  const links = block.chain.map(([hash, words], i) => `${"  ".repeat(i)}${i ? "↳ " : ""}${hash}…  “${words}”`);
  return `block ${block.id}: its hash covers everything before it\n${links.join("\n")}`;
}

function queues(frame) {
  const running = frame.running.map((r) => `${r.id} ${r.computed}/${r.tokens}`).join(", ");
  const waiting = frame.waiting.map((r) => `${r.id} (${r.tokens})`).join(", ");
  return `running: ${running || "nobody"}   ·   waiting: ${waiting || "nobody"}   ·   reused next: ${frame.free.join(" ") || "none"}`;
}

function controls(model) {
  const last = model.get("film").frames.length - 1;
  const bar = node("div", { class: "bar" });
  const play = node("button", { class: "play", title: "play or pause" }, "▶");
  const back = node("button", { title: "one event back" }, "‹");
  const on = node("button", { title: "one event on" }, "›");
  const scrub = node("input", { type: "range", min: 0, max: last, "aria-label": "event" });
  const speed = node("select", { "aria-label": "events a second" });
  for (const n of [1, 2, 4, 8]) speed.append(node("option", { value: n }, `${n}/s`));
  speed.value = 2;
  bar.append(back, play, on, scrub, speed);
  return { bar, play, back, on, scrub, speed, last };
}

function render({ model, el }) {
  const film = model.get("film");
  const { bar, play, back, on, scrub, speed, last } = controls(model);
  const title = node("div", { class: "title", "aria-live": "polite" });
  const stage = node("div", { class: "stage" });
  const state = node("div", { class: "state" });
  const line = node("pre", { class: "line" });
  const chain = node("pre", { class: "chain" }, "Click a block to see its hash chain.");
  el.classList.add("pagedattn-player");
  el.append(bar, title, stage, state, line, chain);
  let clock = null;
  let chosen = null; // the block whose chain is shown

  const at = () => model.get("frame");
  const go = (i) => {
    model.set("frame", Math.max(0, Math.min(last, i)));
    model.save_changes();
  };
  const stop = () => {
    clearInterval(clock);
    clock = null;
    play.textContent = "▶";
  };
  const tick = () => (at() >= last ? stop() : go(at() + 1));
  const start = () => {
    if (at() >= last) go(0);
    clock = setInterval(tick, 1000 / Number(speed.value));
    play.textContent = "❚❚";
  };

  const draw = () => {
    const frame = film.frames[at()];
    scrub.value = at();
    title.textContent = `${at() + 1} of ${last + 1} · step ${frame.step}: ${frame.text}`;
    stage.replaceChildren(drawFrame(film, frame));
    state.textContent = queues(frame);
    line.textContent = describeLine(frame);
    const block = frame.blocks.find((b) => b.id === chosen);
    if (block) chain.textContent = describeChain(block);
  };
  const blockAt = (event) => {
    const group = event.target.closest("[data-block]");
    return group ? Number(group.dataset.block) : null;
  };

  play.addEventListener("click", () => (clock ? stop() : start()));
  back.addEventListener("click", () => go(at() - 1));
  on.addEventListener("click", () => go(at() + 1));
  scrub.addEventListener("input", () => go(Number(scrub.value)));
  speed.addEventListener("change", () => clock && (stop(), start()));
  stage.addEventListener("mouseover", (event) => {
    const touch = lastTouch(film, at(), blockAt(event));
    if (touch) line.textContent = describeLine(touch);
  });
  stage.addEventListener("mouseleave", () => (line.textContent = describeLine(film.frames[at()])));
  stage.addEventListener("click", (event) => {
    chosen = blockAt(event) ?? chosen;
    draw();
  });
  model.on("change:frame", draw);
  draw();
  return () => {
    stop();
    model.off("change:frame", draw);
  };
}

export default { render };
