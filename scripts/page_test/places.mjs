// Where the reader is: at the end while an answer comes, or where they scrolled to; on a phone, after a reload, and turned.

import assert from 'node:assert/strict';
import { setTimeout as sleep } from 'node:timers/promises';

const LONG = Array.from({ length: 60 }, (_, i) => `Paragraph ${i + 1} of a long answer, with **enough** words to take two or three lines on a phone.`).join('\n\n');

export default function steps({ step, page: the, offline, tell, shot, text, count, say, set, fresh, until, settle, api, hash, instead }) {
  const page = new Proxy({}, { get: (_, name) => { const value = the()[name]; return typeof value === 'function' ? value.bind(the()) : value; } });
  const scrolled = () => page.evaluate(() => { const { scrollTop, scrollHeight, clientHeight } = document.getElementById('scroll'); return { top: scrollTop, left: scrollHeight - scrollTop - clientHeight }; });
  /** The first words below the upper edge. */
  const words = () => page.evaluate(() => {
    const edge = document.getElementById('scroll').getBoundingClientRect().top;
    return [...document.querySelectorAll('.answer > *')].find((node) => node.getBoundingClientRect().bottom > edge + 1)?.textContent.slice(0, 14);
  });
  const scrollTo = async (top) => { await page.evaluate((top) => { document.getElementById('scroll').scrollTop = top; }, top); await sleep(60); };
  const inView = (selector) => page.evaluate((selector) => { const box = document.querySelector(selector).getBoundingClientRect(); return box.top >= 0 && box.bottom <= (window.testHeight ?? innerHeight) + 0.5; }, selector);

  step('while an answer comes the end is followed by a reader who is there, and by no other', () => offline(async () => {
    await page.setViewportSize({ width: 390, height: 844 });
    let done = tell(LONG, { every: 3 });
    await until('it is longer than the screen', async () => (await scrolled()).top > 300);
    for (let i = 0; i < 5; i += 1) { await sleep(50); assert.ok((await scrolled()).left < 10); }
    assert.equal(await page.locator('#to-end').isVisible(), false);
    // A little up is up: what comes does not pull the page from under a finger.
    await scrollTo((await scrolled()).top - 40);
    const { top } = await scrolled();
    await sleep(200);
    assert.equal((await scrolled()).top, top);
    await until('there is a way to the end', () => page.locator('#to-end').isVisible());
    await shot('to-end');
    await done;
    assert.equal((await scrolled()).top, top, 'the end of the answer moved the reader');
    done = page.click('#to-end');
    await done;
    assert.ok((await scrolled()).left < 10);
    await until('the button is gone', async () => !(await page.locator('#to-end').isVisible()));
    assert.equal(await page.evaluate(() => document.activeElement.id), 'scroll');
    // Who comes back to the end by hand is followed again.
    done = tell(LONG, { every: 3 });
    await until('more comes', async () => (await count('.live .answer > p')) > 8);
    await scrollTo((await scrolled()).top - 300);
    await scrollTo(1e6);
    await sleep(150);
    assert.ok((await scrolled()).left < 10);
    await done;
    await page.setViewportSize({ width: 1280, height: 800 });
  }));

  step('a reload and a turned screen keep the place', async () => {
    await fresh();
    await say('Tell me');
    const session = await api(`/v1/sessions/${hash()}`);
    session.tree[0].messages.at(-1).content = LONG;
    await instead((route) => route.fulfill({ json: session }), async () => {
      await page.setViewportSize({ width: 390, height: 844 });
      await page.reload();
      await settle(1);
      assert.ok((await scrolled()).left < 10, 'a conversation opens at its end');
      await scrollTo(1800);
      const before = await words();
      await page.setViewportSize({ width: 844, height: 390 });
      await sleep(200);
      assert.equal(await words(), before, 'turned');
      await shot('landscape');
      await page.setViewportSize({ width: 390, height: 844 });
      await sleep(200);
      assert.equal(await words(), before, 'turned back');
      await sleep(300);
      await page.reload();
      await settle(1);
      await sleep(100);
      assert.equal(await words(), before, 'reloaded');
      await scrollTo(1e6);
      await page.setViewportSize({ width: 844, height: 390 });
      await sleep(200);
      assert.ok((await scrolled()).left < 10, 'the end stays the end');
      await page.setViewportSize({ width: 390, height: 844 });
    }, `**/v1/sessions/${session.id}`);
    await page.setViewportSize({ width: 1280, height: 800 });
  });

  step('a keyboard on the screen hides neither the composer nor the end', () => offline(async () => {
    await page.setViewportSize({ width: 390, height: 844 });
    await tell(LONG);
    assert.match(await page.locator('meta[name=viewport]').getAttribute('content'), /interactive-widget=resizes-content/);
    // Where the keyboard lies over the page, as on iOS: only the visual viewport is smaller.
    const keyboard = (height) => page.evaluate((height) => {
      window.testHeight = height;
      Object.defineProperty(visualViewport, 'height', { value: height, configurable: true });
      visualViewport.dispatchEvent(new Event('resize'));
    }, height);
    await keyboard(420);
    await sleep(100);
    assert.ok(await inView('#composer'));
    assert.ok((await scrolled()).left < 10);
    assert.equal(await page.evaluate(() => Math.round(document.querySelector('main').getBoundingClientRect().height)), 420);
    await shot('keyboard');
    await keyboard(844);
    await sleep(100);
    assert.equal(await page.evaluate(() => document.documentElement.style.getPropertyValue('--height')), '');
    assert.ok(await inView('#composer'));
    // Where it makes the page smaller, as on Android.
    await page.setViewportSize({ width: 390, height: 430 });
    await page.evaluate(() => { window.testHeight = 430; });
    await sleep(100);
    assert.ok(await inView('#composer'));
    assert.ok((await scrolled()).left < 10);
    await page.setViewportSize({ width: 1280, height: 800 });
  }));
}
