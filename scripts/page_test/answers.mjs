// What an answer looks like: Markdown while it streams and hostile text, thoughts, and an answer that goes on.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';

export const EVERYTHING = `# A heading with \`code\`

A paragraph with **bold**, *italic*, ***both***, ~~struck~~ words, a [link](https://example.org/a?b=1&c=2 "its title"),
<https://example.com/auto>, https://example.net/bare, mail to me@example.org, and an ![image](https://example.org/x.png).
Ampersands: &amp; &lt;b&gt; &#9731; &copy;

## A list

- first
- second, with more words so that it wraps on a narrow screen and one sees how the second line is set
  - nested *item*
    1. numbered
    2. deeper still
- third

- [ ] to do
- [x] done

7. seven
8. eight

### A table

| Model | Tokens | Note |
|:------|-------:|:----:|
| Mamba | 1,024 | **fast** |
| Attention | 512 | \`slow | er\` |

> A quote with two lines
> and *emphasis*
>
> > and one inside

\`\`\`rust
fn main() {
    println!("Hello, <b>world</b>"); // a comment that is long enough to need scrolling on a phone
}
\`\`\`

---

#### שלום עולם

זו פסקה בעברית, עם **מילה מודגשת** ועם code.

##### Last heading
###### And smaller

The end.`;

/** Documents whose last block changes its kind while it comes. */
const TURNING = [
  'Here is a list:\n- one\n- two\n\nAnd so on', 'Title\n=====\n\ntext\n---\nmore', '1. a\n\n2. b\n\n   more of b\n\n10. c', 'a\n\n    code\n\n    more\n\nb',
  '- a\n- b\n\n- c\n\nd', '> a\nlazy\n\n> b\n\nc', '| a | b |\n|---|---|\n| 1 | 2 |\n\n| not a table |\nbut text', '```\ncode\n```\n```js\nmore\n', '~~~\n```\n~~~\nx',
  'See [here][1] and [there][2].\n\ntext\n\n[1]: https://a.example/\n[2]: https://b.example/ "t"\n\nend [1]', '* a\n\n  b\n\n      code\n* c', '**bold *both* bold** `a``b` *x', '\n\n  leading\r\n\r\nwindows\r\n',
  '- [x] a\n- [ ] b\n  - [ ] c', '***\n___\n- - -\n', '# a\n## b\n#c\n', 'a  \nb\\\nc', '1984\n\n1985. was\n2. not', '<div>\n**x**\n</div>\n\ny', 'x | y\n--|--\n1 | 2', '- a\n  ```\n  b\n  ```\n- c\n\n  > d',
];

/** What must stay text, or a link to where it may lead. */
const HOSTILE = [
  '<script>window.hurt = 1</script>', '<img src=x onerror="window.hurt = 2">', '<svg/onload=window.hurt=3>', '<a href="javascript:window.hurt=4">x</a>', '<!-- <b>x</b> -->', '<iframe srcdoc="<script>parent.hurt=5</script>">',
  '[x](javascript:window.hurt=6)', '[x](JaVaScRiPt:window.hurt=7)', '[x](  javascript:window.hurt=8)', '[x](java\tscript:window.hurt=9)', '[x](&#106;avascript:window.hurt=10)', '[x](javascript&colon;window.hurt=11)', '[x](javascript&#58;window.hurt=12)',
  '[x](data:text/html,<script>opener.hurt=13</script>)', '[x](vbscript:hurt)', '[x](file:///etc/passwd)', '[x](blob:http://a/b)', '[x](//evil.example/a)', '[x](/v1/sessions)', '[x](#here)', '[x](x:y)', '<javascript:window.hurt=14>', '<data:text/html,x>',
  '[x](<javascript:window.hurt=15>)', '[x]: javascript:window.hurt=16\n\n[x]', '![x](javascript:window.hurt=17)', '![x](https://evil.example/pixel.png)', '![x](data:image/svg+xml,<svg onload=hurt>)', '![](https://evil.example/no-words.png)',
  '[x](https://a.example/" onclick="window.hurt=18)', '[x](https://a.example/ "t\\" onmouseover=\\"window.hurt=19")', "[x](https://a.example/ '\" autofocus onfocus=window.hurt=20 x=\"')", '[<img src=x onerror=window.hurt=21>](https://a.example/)', '[**a** ![b](javascript:window.hurt=22)](https://a.example/)',
  '```"><script>window.hurt=23</script>\nx\n```', '```js onload=window.hurt=24\nx\n```', '``` x" class="go-on" data-action="remove\ny\n```', '`<b>x</b>`', '| <script>window.hurt=25</script> | [x](javascript:window.hurt=26) |\n|---|---|\n| <img src=x onerror=window.hurt=27> | `<b>` |',
  '# <img src=x onerror=window.hurt=28>', '- [x] <input autofocus onfocus=window.hurt=29>', '> <style>*{display:none}</style>', '<form action="https://evil.example"><button>x</button></form>', '<base href="https://evil.example/">', '<meta http-equiv=refresh content="0;url=https://evil.example">', '<link rel=stylesheet href=https://evil.example/a.css>',
  '&lt;script&gt;window.hurt=30&lt;/script&gt;', '&#60;img src=x onerror=window.hurt=31&#62;', '[x](https://user:pass@a.example:8/ü?q=%00)', '[x](mailto:a@b.example?subject=%0d%0aBcc:c)', 'www.a.example/<script>', '\u0000\u202e[x](https://a.example/\u0000)', '[__proto__]: https://a.example/\n\n[__proto__] &constructor; &__proto__; &toString;',
];

const many = (count, of) => Array.from({ length: count }, (_, i) => (typeof of === 'function' ? of(i) : of)).join('');

/** Text that is slow to read, or deep. */
const SLOW = {
  'quotes in quotes': '> '.repeat(10_000) + 'x', 'quotes without spaces': '>'.repeat(10_000), 'lists in lists': '- '.repeat(10_000) + 'x', 'numbers in numbers': '1. '.repeat(10_000), 'lists in quotes': '> - '.repeat(10_000), 'lists by depth': many(300, (i) => `${' '.repeat(2 * i)}- a\n`),
  'lazy quotes': many(300, (i) => `${'>'.repeat(20 - (i % 20))} a\nb\n`), brackets: '['.repeat(10_000), 'brackets closed': '['.repeat(10_000) + ']'.repeat(10_000), 'links in links': '[a]('.repeat(10_000), 'links closed': `${'[a](b'.repeat(10_000)})`, 'images in images': '!['.repeat(10_000), references: `[a]: x\n\n${'[[a][a]'.repeat(5000)}`,
  'emphasis in emphasis': '*a **b '.repeat(5000) + ' c** d*'.repeat(5000), 'emphasis of all kinds': '*a **b _c __d ~~e '.repeat(1100), stars: '*'.repeat(20_000) + 'a' + '*'.repeat(20_000), underscores: '_a '.repeat(20_000), backticks: many(400, (i) => `${'`'.repeat(i)}a `), tildes: '~a ~~b '.repeat(8000),
  'a mail without end': `${'a.'.repeat(20_000)}@`, addresses: 'http://a.b/'.repeat(6000), angles: '<a '.repeat(20_000), comments: '<!--'.repeat(10_000), backslashes: '\\'.repeat(60_000), ampersands: '&#1'.repeat(20_000), 'a line of 1 MB': 'x'.repeat(1 << 20), 'words of 1 MB': 'word '.repeat(1 << 18), 'a line of spaces': `a${' '.repeat(200_000)}b`, 'empty lines': '\n'.repeat(200_000), 'tabs and marks': '\t- '.repeat(20_000),
  'a wide table': `${'|a'.repeat(300)}\n${'|-'.repeat(300)}\n${many(100, `${'|b'.repeat(300)}\n`)}`, pipes: '|'.repeat(30_000), 'a table without end': `${'|-'.repeat(20_000)}\n${'|-'.repeat(20_000)}`, definitions: '[a]: b\n'.repeat(10_000), headings: '# '.repeat(20_000), fences: '```\na\n'.repeat(5000), 'a list of 256 kB': many(12_000, (i) => `- item ${i} **b** \`c\`\n`),
};

export default function steps({ step, page: the, offline, tell, options, base, shot, text, count, say, set, fresh, until, settle, settleAnswer, answers, hash, api, turns }) {
  const page = new Proxy({}, { get: (_, name) => { const value = the()[name]; return typeof value === 'function' ? value.bind(the()) : value; } });

  step('the file of others is that of its package', async () => {
    const folder = new URL('node_modules/marked/', import.meta.url);
    for (const [path, file] of [['marked.esm.js', 'lib/marked.esm.js'], ['marked.LICENSE.md', 'LICENSE']]) {
      const served = await (await fetch(`${base}/vendor/${path}`)).text();
      assert.equal(served, readFileSync(new URL(file, folder), 'utf8'), path);
    }
    const { version } = JSON.parse(readFileSync(new URL('package.json', folder), 'utf8'));
    const about = readFileSync(new URL('../../crates/server/page/vendor/README.md', import.meta.url), 'utf8');
    assert.ok(about.includes(`version ${version},`), `vendor/README.md does not say ${version}`);
  });

  step('Markdown of every kind becomes elements', () => offline(async () => {
    await tell(EVERYTHING);
    const has = async (selector, number = 1) => assert.equal(await count(`.answer ${selector}`), number, selector);
    for (const [selector, number] of [
      ['h2', 1], ['h3', 1], ['h4', 1], ['h5', 1], ['h6', 2], ['ul > li > ul > li > ol > li', 2], ['li.task input[type=checkbox]:disabled', 2], ['li.task input:checked', 1], ['ol[start="7"] > li', 2],
      ['table th[scope=col]', 3], ['td.end', 2], ['td.center strong', 1], ['blockquote blockquote', 1], ['.code pre code', 1], ['hr', 1], ['em strong, strong em', 1], ['del', 1], ['a', 5], ['a.image', 1],
      ['a[rel~=noopener][target=_blank]', 5], ['a[title="its title"]', 1], [':is(img, script, b)', 0],
    ]) await has(selector, number);
    assert.equal(await text('.code-head span'), 'rust');
    assert.match(await text('.code pre'), /^fn main\(\) \{\n {4}println!\("Hello, <b>world<\/b>"\);/);
    assert.match(await text('.answer'), /Ampersands: & <b> ☃ ©/);
    const directions = await page.evaluate(() => [...document.querySelectorAll('.answer > h5, .answer > h5 + p, .answer > h2')].map((node) => getComputedStyle(node).direction));
    assert.deepEqual(directions, ['ltr', 'rtl', 'rtl']);
    await page.setViewportSize({ width: 1280, height: 2300 });
    await shot('markdown');
    await page.emulateMedia({ colorScheme: 'dark' });
    await shot('markdown-dark');
    for (const width of [390, 360]) {
      await page.setViewportSize({ width, height: 1900 });
      await until('the drawer is shut', async () => !(await page.locator('#sidebar').isVisible()));
      await shot(`markdown-${width}`);
      const wide = await page.evaluate(() => [...document.querySelectorAll('main *')].filter((node) => node.getBoundingClientRect().right > innerWidth + 0.5 && !node.closest('.code pre, .table')).map((node) => node.outerHTML.slice(0, 60)));
      assert.deepEqual(wide, [], `at ${width} pixels`);
    }
    await page.emulateMedia({ colorScheme: 'light' });
    await page.setViewportSize({ width: 1280, height: 800 });
  }));

  step('an answer that comes letter by letter ends as one that comes whole', async () => {
    const different = await page.evaluate(async (documents) => {
      const { Prose } = await import('/js/prose.js');
      const shown = (write) => { const root = document.createElement('div'); write(new Prose(root)); root.normalize(); return root; };
      const result = [];
      for (const text of documents) {
        const letters = [...text];
        const slow = shown((prose) => { letters.forEach((_, i) => prose.write(letters.slice(0, i + 1).join(''))); prose.write(text, false); });
        const whole = shown((prose) => prose.write(text, false));
        if (!slow.isEqualNode(whole)) result.push([text, slow.outerHTML, whole.outerHTML]);
      }
      return result;
    }, [EVERYTHING, ...TURNING, ...HOSTILE]);
    assert.deepEqual(different, []);
  });

  step('Markdown that is not whole yet shows no marks', async () => {
    const seen = await page.evaluate(async (documents) => {
      const { Prose } = await import('/js/prose.js');
      const result = [];
      for (const text of documents) {
        const root = document.createElement('div');
        const prose = new Prose(root);
        for (let i = 1; i <= text.length; i += 1) {
          prose.write(text.slice(0, i));
          if (/\*\*|~~|`|\|\s*-|\]\(|(^|\n)#|(^|\n)- |https?:\/\/example\.org/.test(root.textContent)) result.push(`${text.slice(0, i)} => ${root.textContent}`);
          // A line below a paragraph that may begin a list is no heading of it.
          if (root.querySelector('h2, h3') && !/^#/m.test(text.slice(0, i))) result.push(`heading: ${text.slice(0, i)}`);
        }
      }
      return result;
    }, ['Some **bold words** and *italic ones*, `code here`, ~~gone~~ and [a link](https://example.org/a_b "title") at last.', 'List:\n- **a**\n- b\n\n| x | y |\n|:--|--:|\n| **1** | `2` |\n\ndone', 'Text\n\n# Head **bold**\n\n```js\nlet a = 1;\n```\nAfter', '***both*** and **bold *inner* bold**, ``a b`` end']);
    assert.deepEqual(seen.slice(0, 3), []);
  });

  step('64 kB that come token by token cost time in proportion', async () => {
    const times = await page.evaluate(async (everything) => {
      const { Prose } = await import('/js/prose.js');
      const time = (size) => {
        const text = `${everything}\n\n`.repeat(60).slice(0, size);
        const prose = new Prose(document.createElement('div'));
        const start = performance.now();
        for (let i = 4; i < text.length; i += 4) prose.write(text.slice(0, i));
        prose.write(text, false);
        return performance.now() - start;
      };
      time(4 << 10); // until it is compiled
      return [time(16 << 10), time(64 << 10)];
    }, EVERYTHING);
    console.log(`      16 kB: ${times[0].toFixed(0)} ms, 64 kB: ${times[1].toFixed(0)} ms, a token a step`);
    assert.ok(times[1] < 9 * times[0], `four times the text took ${(times[1] / times[0]).toFixed(1)} times as long`);
  });

  step('hostile text neither hangs nor crashes the page', () => offline(async () => {
    let slowest = [0, ''];
    for (const [name, source] of Object.entries(SLOW)) {
      const time = await page.evaluate(async (source) => {
        const { Prose } = await import('/js/prose.js');
        const root = document.createElement('div');
        const prose = new Prose(root);
        const start = performance.now();
        prose.write(source.slice(0, source.length / 2));
        prose.write(source);
        prose.write(source, false);
        return performance.now() - start;
      }, source);
      if (time > slowest[0]) slowest = [time, name];
      assert.ok(time < 5000, `${name}: ${time.toFixed(0)} ms`);
    }
    console.log(`      slowest: ${slowest[1]}, ${slowest[0].toFixed(0)} ms for three steps`);
    await tell(SLOW['quotes in quotes'].slice(0, 15_000) + '\n\n' + SLOW['a line of 1 MB'].slice(0, 300_000));
    assert.ok((await text('.answer')).length > 300_000);
    await tell('Still *here*.');
    assert.equal(await count('.turn:last-child .answer em'), 1);
  }));

  step('no text of a model becomes markup, a script or a request', () => offline(async () => {
    await tell(HOSTILE.join('\n\n'), { thought: HOSTILE.join('\n\n') });
    await page.evaluate(() => { document.querySelector('.thought').open = true; });
    const found = await page.evaluate(() => {
      const known = new Set(['P', 'H2', 'H3', 'H4', 'H5', 'H6', 'UL', 'OL', 'LI', 'INPUT', 'BLOCKQUOTE', 'HR', 'DIV', 'SPAN', 'BUTTON', 'PRE', 'CODE', 'TABLE', 'THEAD', 'TBODY', 'TR', 'TH', 'TD', 'STRONG', 'EM', 'DEL', 'BR', 'A']);
      const attributes = new Set(['class', 'dir', 'type', 'data-action', 'tabindex', 'disabled', 'checked', 'aria-label', 'href', 'target', 'rel', 'title', 'start', 'scope']);
      const classes = new Set(['code', 'code-head', 'table', 'task', 'center', 'end', 'image', '']);
      const odd = [];
      for (const node of document.querySelectorAll('.answer *, .thoughts *')) {
        if (!known.has(node.tagName)) odd.push(node.outerHTML);
        for (const { name, value } of node.attributes) {
          if (!attributes.has(name) || (name === 'class' && !classes.has(value)) || (name === 'data-action' && value !== 'copyCode')) odd.push(`${name}=${value}`);
          if (name === 'href' && !/^(https?|mailto):/.test(value)) odd.push(value);
        }
        if (node.tagName === 'A' && (node.target !== '_blank' || !node.relList.contains('noopener'))) odd.push(node.outerHTML);
      }
      return { odd, hurt: window.hurt, links: [...new Set([...document.querySelectorAll('.answer a')].map((link) => link.protocol))] };
    });
    assert.deepEqual(found.odd, []);
    assert.equal(found.hurt, undefined);
    assert.deepEqual(found.links.sort(), ['http:', 'https:', 'mailto:']);
    await page.setViewportSize({ width: 1280, height: 3200 });
    await shot('hostile');
    await page.setViewportSize({ width: 1280, height: 800 });
  }));

  step('code is copied by its button', () => offline(async () => {
    await page.context().grantPermissions(['clipboard-read', 'clipboard-write']);
    await tell('```py\nprint("<&>")\n\n\tx\n```');
    await page.locator('.code button').focus();
    await page.keyboard.press('Enter');
    await until('it says so', async () => (await text('.code button')) === 'Copied');
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'print("<&>")\n\n\tx');
    assert.equal(await text('#status'), 'Copied');
    await until('it says so no more', async () => (await text('.code button')) === 'Copy');
    await page.evaluate(() => Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true }));
    await page.evaluate(() => document.querySelector('[aria-label="Copy the answer of turn 1"]').click());
    await until('without the clipboard too', async () => (await text('#status')) === 'Copied');
    assert.equal(await count('#error:not([hidden])'), 0);
    await page.evaluate(() => delete navigator.clipboard);
  }));

  step('a thought is open while it comes, and folds when the answer begins', () => offline(async () => {
    const hold = { thought: 'First I *weigh* it.\n\n- one\n- two', hold: 'thought' };
    const done = tell('The **answer**.', hold);
    await until('it thinks', async () => (await count('.live .thought[open] .thoughts em')) === 1);
    assert.equal(await text('.live summary'), 'Thinking');
    await shot('thinking');
    await new Promise((resolve) => { setTimeout(resolve, 1100); });
    await page.evaluate(() => window.release());
    await done;
    assert.equal(await count('.thought:not([open])'), 1);
    assert.match(await text('.thought summary'), /^Thought for \d+ seconds?$/);
    assert.equal(await text('.answer'), 'The answer.');
    await shot('thought');
    await page.locator('.thought summary').focus();
    await page.keyboard.press('Enter');
    assert.equal(await count('.thought[open]'), 1);
    await shot('thought-open');
    const sent = await page.evaluate(() => window.asked.at(-1));
    assert.equal(sent.reasoning_format, 'auto');
    // Whoever opened or shut it by hand is obeyed.
    const again = tell('Yes.', { thought: 'Hm.', hold: 'thought' });
    await page.locator('.live .thought summary').click();
    await page.locator('.live .thought summary').click();
    await page.evaluate(() => window.release());
    await again;
    assert.equal(await count('.turn:last-child .thought[open]'), 1);
    assert.equal((await page.evaluate(() => window.asked.at(-1))).messages.at(-2).reasoning_content, 'First I *weigh* it.\n\n- one\n- two');
  }));

  step('a screen reader is told of an answer, not of its tokens', () => offline(async () => {
    await page.evaluate(() => {
      window.said = [];
      new MutationObserver(() => window.said.push(document.getElementById('status').textContent)).observe(document.getElementById('status'), { childList: true, characterData: true, subtree: true });
    });
    await tell('One **two** three four five six. '.repeat(30), { every: 2 });
    const said = await page.evaluate(() => window.said);
    assert.equal(said[0], 'Answering');
    assert.match(said.at(-1), /^Answered, .*: One two three/);
    assert.ok(said.length <= 3, `${said.length} messages`);
    assert.equal(await page.locator('#log').getAttribute('aria-live'), 'off');
  }));

  step('without sessions an answer that was cut goes on too', () => offline(async () => {
    await set({ temperature: 0, max_tokens: 20 });
    await say('It was late, and the sea');
    const [first] = await answers();
    await page.locator('.go-on').click();
    await until('it went on', async () => (await answers())[0].length > first.length);
    await settleAnswer(1);
    assert.ok((await answers())[0].startsWith(first));
    assert.deepEqual([await count('.turn-link'), await count('.user')], [1, 1]);
  }));

  step('without sessions a thought that was cut goes on as a thought', () => offline(async () => {
    await tell('', { thought: 'First this', finish: 'length' });
    assert.deepEqual([await count('.thought'), await count('.go-on')], [1, 1]);
    await tell('', { thought: ' and then', finish: 'length', goesOn: true });
    await tell('Yes.', { thought: ' that.', goesOn: true });
    const sent = (await page.evaluate(() => window.asked)).slice(-2);
    for (const [i, thought] of ['First this', 'First this and then'].entries()) {
      const { role, content, reasoning_content: sentThought } = sent[i].messages.at(-1);
      assert.deepEqual([sent[i].continue_final_message, role, content, sentThought], [true, 'assistant', '', thought]);
    }
    assert.equal((await page.locator('.thoughts').textContent()).trim(), 'First this and then that.');
    assert.deepEqual([await answers(), await count('.go-on'), await count('.user')], [['Yes.'], 0, 1]);
  }));

  step('an answer that was cut goes on as one longer answer', async () => {
    for (const values of [{ temperature: 0, seed: '' }, { temperature: 1, seed: 7 }]) {
      await set({ ...values, top_p: '', top_k: '', max_tokens: 60 });
      await fresh();
      await say('It was late, and the sea');
      const [whole] = await answers();
      await set({ max_tokens: 20 });
      await fresh();
      await say('It was late, and the sea');
      assert.equal(await text('.numbers').then((numbers) => /cut at the limit/.test(numbers)), true);
      for (const [i, reload] of [[1, false], [2, true]]) {
        if (reload) { await page.reload(); await settle(1); }
        if (i === 1 && values.temperature === 0) await shot('go-on');
        await page.locator('.go-on').click();
        await until('it went on', async () => (await page.locator('#send').isVisible()) && (await api(`/v1/sessions/${hash()}`)).head === i + 1, 20_000);
        await settleAnswer(1);
      }
      assert.equal((await answers())[0], whole, JSON.stringify(values));
      const session = await api(`/v1/sessions/${hash()}`);
      assert.deepEqual([session.turns, session.head, session.tree[2].continues, session.tree[2].parent], [1, 3, 2, 0]);
      assert.equal(await count('.turn-link'), 1);
      assert.equal(await count('.user'), 1);
      await say('And then');
      assert.equal(await turns().count(), 2);
      assert.match(await page.locator('.numbers').last().innerText(), / [1-9]\d* reused from the state/);
    }
    await set({ temperature: 0, seed: '', max_tokens: 64 });
  });
}
