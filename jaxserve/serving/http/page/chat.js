// The chat page. Everything that comes from the model or the server is put into the page as text, never as HTML.

const byId = (id) => document.getElementById(id);
const messages = byId("messages");
const prompt = byId("prompt");

let conversation = []; // {role, content}, without the system prompt
let running = null; // the AbortController of the answer that is being made

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// -- the server's state

let nextLook;

async function showState() {
  clearTimeout(nextLook);
  let state = "unreachable";
  try {
    state = (await (await fetch("health")).json()).status;
  } catch { /* the server is gone, or is not there yet */ }
  const words = { ready: "ready", starting: "the model is being loaded", draining: "shutting down", failed: "failed" };
  let text = words[state] ?? state;
  if (state === "ready") {
    const answer = await fetch("v1/models", { headers: headers() }).catch(() => null);
    if (answer?.ok) text = (await answer.json()).data[0].id;
    else if (answer?.status === 401) text = "ready, and asks for an API key (see the settings)";
  }
  byId("state-text").textContent = text;
  byId("dot").className = state === "ready" ? "ready" : state === "starting" ? "" : "failed";
  nextLook = setTimeout(showState, state === "starting" ? 1000 : 15000);
}

// -- the conversation

function addMessage(role, text) {
  byId("empty").hidden = true;
  const article = document.createElement("article");
  article.className = role;
  const heading = document.createElement("h2");
  heading.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  article.append(heading, body);
  messages.append(article);
  scrollDown(true);
  return article;
}

function addNote(article, kind, text) {
  const note = document.createElement("div");
  note.className = kind;
  if (kind === "fault") note.setAttribute("role", "alert");
  note.textContent = text;
  article.append(note);
  scrollDown(false);
}

function scrollDown(always) {
  // Who has scrolled up to read is left there.
  const below = messages.scrollHeight - messages.scrollTop - messages.clientHeight;
  if (always || below < 120) messages.scrollTop = messages.scrollHeight;
}

// -- one answer

async function* events(response) {
  const decoder = new TextDecoder();
  let buffer = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request() {
  const system = byId("system").value.trim();
  const temperature = byId("temperature").value;
  const maxTokens = byId("max-tokens").value;
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(maxTokens !== "" && { max_tokens: Number(maxTokens) }),
  };
}

function facts(usage, times, finish) {
  const tokens = usage.completion_tokens;
  const seconds = (times.last - times.first) / 1000;
  return [
    `${tokens} tokens`,
    ...(tokens > 1 && seconds > 0 ? [`${((tokens - 1) / seconds).toFixed(1)} tokens/s`] : []),
    `first after ${((times.first - times.start) / 1000).toFixed(2)} s`,
    `${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`,
    ...(finish === "length" ? ["cut off at the limit"] : []),
  ].join(" · ");
}

async function answer() {
  const turns = conversation; // "New chat" begins another one
  const article = addMessage("assistant", "");
  const body = article.querySelector(".text");
  const times = { start: performance.now() };
  let finish = null;
  running = new AbortController();
  showRunning();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal });
    if (response.status === 401) showSettings(true);
    if (!response.ok) {
      const error = (await response.json().catch(() => null))?.error;
      throw new Error(error?.message ?? `the server answered ${response.status}`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice?.delta?.content) {
        times.last = performance.now();
        times.first ??= times.last;
        body.append(choice.delta.content);
        scrollDown(false);
      }
      finish = choice?.finish_reason ?? finish;
      if (event.usage) {
        times.first ??= times.last = performance.now();
        addNote(article, "facts", facts(event.usage, times, finish));
      }
    }
  } catch (error) {
    if (error.name === "AbortError") addNote(article, "facts", "stopped");
    else addNote(article, "fault", error.message);
  }
  running = null;
  if (body.textContent) turns.push({ role: "assistant", content: body.textContent });
  showRunning();
}

// -- what the user does

function showRunning() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  messages.setAttribute("aria-busy", String(running !== null));
  if (running === null) prompt.focus();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running) return;
  if (conversation.at(-1)?.role === "user") conversation.pop(); // it got no answer
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  prompt.value = "";
  fitPrompt();
  answer();
});

prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());

byId("new").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  for (const article of messages.querySelectorAll("article")) article.remove();
  byId("empty").hidden = false;
  prompt.focus();
});

function showSettings(open) {
  byId("settings").hidden = !open;
  byId("settings-button").setAttribute("aria-expanded", String(open));
}

byId("settings-button").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("key").addEventListener("change", showState);

showState();
