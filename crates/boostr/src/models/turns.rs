//! Layers that take a few blocks in turns: the weights of a block are in a file once, or under every layer.

/// User k of the blocks, counted among users alone, has block k mod `blocks`. A block's parameters are under the first
/// layer that has it, after `under`.
pub(super) struct Turns {
    /// What comes before the number of a layer.
    pub(super) layers: &'static str,
    /// What comes after it.
    pub(super) under: &'static str,
    /// The layers that have a block.
    pub(super) users: Vec<usize>,
    /// How many blocks there are.
    pub(super) blocks: usize,
}

impl Turns {
    /// What the parameters of a user's block are under.
    pub(super) fn under_home(&self, user: usize) -> String {
        let home = self.users[user % self.blocks];
        format!("{}.{home}.{}", self.layers, self.under)
    }

    /// The number among users of the layer that a tensor is of, and its name there.
    fn split<'n>(&self, name: &'n str) -> Option<(usize, &'n str)> {
        let (layer, rest) = name.strip_prefix(self.layers)?.strip_prefix('.')?.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        Some((self.users.iter().position(|&user| user == layer)?, rest))
    }

    /// The name of a block's tensor under the first layer that has it; `None` for what is of no block.
    pub(super) fn home(&self, name: &str) -> Option<String> {
        let (user, rest) = self.split(name)?;
        let part = rest.strip_prefix(self.under).filter(|part| part.starts_with('.'))?;
        Some(self.under_home(user) + part)
    }

    /// The names that a block's tensor has under all layers that have it; another's own.
    pub(super) fn names(&self, name: &str) -> Vec<String> {
        let home = self.home(name).unwrap_or_default();
        let Some((first, rest)) = self.split(&home) else { return vec![name.to_owned()] };
        let users = self.users.iter().skip(first).step_by(self.blocks);
        users.map(|user| format!("{}.{user}.{rest}", self.layers)).collect()
    }
}
