// The openai package of npm: chat, completions and responses, whole and streamed, and errors. Arguments: URL, key.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const greedy = { model: "tiny", temperature: 0 };

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ["tiny"]);

const completion = await client.completions.create({ prompt: "a", max_tokens: 100, ...greedy });
assert.equal(completion.choices[0].text, "bcdefghijklmnopqrstuvwxyz");
assert.equal(completion.choices[0].finish_reason, "stop");

const chat = await client.chat.completions.create({ messages, ...greedy });
assert.equal(chat.choices[0].message.content, "WORLD");

let text = "", usage = null, reasons = [];
const stream = await client.chat.completions.create({
  messages, stream: true, stream_options: { include_usage: true }, ...greedy });
for await (const chunk of stream) {
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    if (choice.finish_reason) reasons.push(choice.finish_reason);
  }
}
assert.equal(text, "WORLD");
assert.deepEqual(reasons, ["stop"]);
assert.equal(usage.completion_tokens, 6);

const helper = client.chat.completions.stream({ messages, ...greedy });
assert.equal(await helper.finalContent(), "WORLD");

const response = await client.responses.create({ input: "Hi", ...greedy });
assert.equal(response.output_text, "WORLD");
let deltas = "";
for await (const event of await client.responses.create({ input: "Hi", stream: true, ...greedy })) {
  if (event.type === "response.output_text.delta") deltas += event.delta;
}
assert.equal(deltas, "WORLD");

const left = await client.completions.create({ prompt: "b", max_tokens: 20, stream: true, ...greedy });
for await (const _ of left) break; // leaves

await assert.rejects(client.completions.create({ prompt: "a".repeat(5000), ...greedy }), OpenAI.BadRequestError);
await assert.rejects(client.completions.create({ model: "gpt", prompt: "a" }), OpenAI.NotFoundError);
await assert.rejects(new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(), OpenAI.AuthenticationError);
console.log("openai (npm) ended well");
